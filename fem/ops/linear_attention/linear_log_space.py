"""Linear attention token by token, in logarithms: exact at any magnitude, by operations that PyTorch can transform.

It reads what is in doubt, generation on a CPU, `torch.export`, `torch.func` and second derivatives.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fem.ops.common.read import LOG_ZERO, NO_WEIGHT, Terms, log, log_average, merge
from fem.ops.common.steps import along_time


def linear_step(memory: Terms, q, k, g, v, f, beta) -> tuple[Terms, Terms]:
    """The read of one token and the memory after it; q, k, g, v, f are (B, H, d), the memory (B, H, d_k, ..).

    w'_c = e^{g_c} w_c + k_c        mean'_c, F'_c: the reads of channel c and of the token, merged
    Z = sum_c q_c w'_c      mean = sum_c q_c w'_c mean'_c / Z      F = (1/beta) log(sum_c q_c w'_c e^{beta F'_c} / Z)
    """
    rate, (v, f) = beta.unsqueeze(1), (x.unsqueeze(2) for x in (v, f))
    left = memory if g is None else memory._replace(log_weight=memory.log_weight + g.unsqueeze(-1))
    token = Terms(log(k).unsqueeze(-1), v.expand_as(memory.mean), f.expand_as(memory.free_energy))
    after = merge(left, token, rate)
    after = after._replace(log_weight=after.log_weight.clamp_min(LOG_ZERO))
    scores = log(q).unsqueeze(-1) + after.log_weight
    total = scores.logsumexp(2, keepdim=True)
    seen = total > NO_WEIGHT
    log_p = torch.where(seen, scores - total, LOG_ZERO)  # rows that see nothing have no p that sums to 1
    mean = torch.where(seen, log_p.exp().mT @ after.mean, 0)
    free_energy = torch.where(seen, log_average(log_p, rate * after.free_energy, 2) / rate, 0)
    total = torch.where(seen, total, LOG_ZERO)
    return Terms(*(x.squeeze(2) for x in (total, mean, free_energy))), after


def linear_by_steps(memory: Terms, q, k, g, v, f, beta) -> tuple[Terms, Terms]:
    """The scan of (B, T, H, d), one `linear_step` after another."""

    def token(before: list[Tensor], *inputs: Tensor | None):
        read, after = linear_step(Terms(*before), *inputs, beta)
        return list(after), list(read)

    last, rows = along_time(token, list(memory), q, k, g, v, f)
    return Terms(*rows), Terms(*last)
