"""Linear attention token by token, in logarithms: exact at any magnitude, by operations that PyTorch can transform.

It reads what is in doubt, generation on a CPU, `torch.export`, `torch.func` and second derivatives.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fem.ops.common.launch import by_kernels
from fem.ops.common.read import LOG_ZERO, NO_WEIGHT, Terms, log, log_average, merge


def linear_step(memory: Terms, q, k, g, opens, v, f, beta) -> tuple[Terms, Terms]:
    """The read of one token and the memory after it; q, k, g, v, f are (B, 1, H, d), the memory (B, H, d_k, ..).

    w'_c = e^{g_c} w_c + k_c        mean'_c, F'_c: the reads of channel c and of the token, merged
    Z = sum_c q_c w'_c      mean = sum_c q_c w'_c mean'_c / Z      F = (1/beta) log(sum_c q_c w'_c e^{beta F'_c} / Z)
    """
    if by_kernels(q, k, g, v, f, beta, *memory):
        from fem.ops.linear_attention.linear_token import linear_token  # by Triton, which the library does not require

        return linear_token(memory, q, k, g, opens, v, f, beta)
    g, rate = forget(q, g, opens), beta.unsqueeze(1)
    q, k, g, v, f = (None if x is None else x.transpose(1, 2) for x in (q, k, g, v, f))
    left = memory if g is None else memory._replace(log_weight=memory.log_weight + g.mT)
    after = merge(left, Terms(log(k).mT, v.expand_as(memory.mean), f.expand_as(memory.free_energy)), rate)
    after = after._replace(log_weight=after.log_weight.clamp_min(LOG_ZERO))
    scores = log(q).mT + after.log_weight
    total = scores.logsumexp(2, keepdim=True)
    seen = total > NO_WEIGHT
    log_p = torch.where(seen, scores - total, LOG_ZERO)  # rows that see nothing have no p that sums to 1
    mean = torch.where(seen, log_p.exp().mT @ after.mean, 0)
    free_energy = torch.where(seen, log_average(log_p, rate * after.free_energy, 2) / rate, 0)
    total = torch.where(seen, total, LOG_ZERO)
    return Terms(*(x.transpose(1, 2) for x in (total, mean, free_energy))), after


def forget(q: Tensor, g: Tensor | None, opens: Tensor | None) -> Tensor | None:
    """Decays by which the memory is forgotten where a document opens."""
    if opens is None:
        return g
    g = torch.zeros_like(q[..., :1]) if g is None else g
    return torch.where(opens[:, :, None, None], LOG_ZERO, g)
