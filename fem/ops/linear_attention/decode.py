"""One token of a keyed scan, for generation: the memory takes it in, and is read."""

from __future__ import annotations

import torch
from torch import Tensor

from fem.ops.common.read import LOG_ZERO, NO_WEIGHT, Terms, log_average, merge
from fem.ops.linear_attention.chunk import Memory
from fem.ops.linear_attention.scores import log


def step(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, g: Tensor | None, memory: Memory
) -> tuple[Terms, Memory]:
    """What a scan of one token returns; q, k, v, g are (B, 1, H, d), the memory (B, H, ...). Without gradients.

    w'_c = e^{g_c} w_c + k_c        mean'_c, F'_c: the reads of channel c and of the token, merged
    Z = sum_c q_c w'_c      mean = sum_c q_c w'_c mean'_c / Z      F = (1/beta) log(sum_c q_c w'_c e^{beta F'_c} / Z)
    """
    value = v.transpose(1, 2).expand_as(memory.mean)
    left = memory.log_weight if g is None else memory.log_weight + g[:, 0]
    per_channel = None if beta is None else beta.unsqueeze(1)
    log_weight, mean, free_energy = merge(
        Terms(left.unsqueeze(-1), memory.mean, memory.free_energy),
        Terms(log(k[:, 0]).unsqueeze(-1), value, value),
        per_channel,
    )
    log_weight = log_weight.clamp_min(LOG_ZERO)
    scores = log(q[:, 0]).unsqueeze(-1) + log_weight
    total = scores.logsumexp(2, keepdim=True)
    seen = total > NO_WEIGHT
    log_p = scores - total
    reads = [torch.where(seen, log_p.exp().mT @ mean, 0)]
    if beta is not None:
        reads.append(torch.where(seen, log_average(log_p, per_channel * free_energy, 2) / per_channel, 0))
    total = torch.where(seen, total, LOG_ZERO)
    terms = (x.transpose(1, 2) for x in (total, *reads))
    return Terms(*terms, *(() if beta is not None else (None,))), Memory(log_weight.squeeze(-1), mean, free_energy)
