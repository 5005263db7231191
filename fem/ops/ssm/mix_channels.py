"""The read over pairs of token and channel, from the reads of the channels."""

from __future__ import annotations

import torch
from torch import Tensor

from fem.ops.common.backend import by_kernels
from fem.ops.common.read import LOG_ZERO, NO_WEIGHT, Terms


def mix_channels(mixing: Tensor, terms: Terms, beta: Tensor) -> Terms:
    """The read over pairs (i, k) of token and channel, weighted M_jk w_k(i), from the reads of the channels.

    w_j = sum_k M_jk w_k        mean_j = sum_k M_jk w_k mean_k / w_j
    F_j = (1 / beta) log sum_k M_jk w_k e^{beta F_k} / w_j                                       (Section 2.3.3 iv)

    mixing (H, d_v, d_v) > 0; terms (B, T, H, d_v); beta (H, d_v), equal within a head, or (H, 0) for the mean only.
    """
    if terms.mean.shape[1] == 1 and by_kernels(mixing, *terms, beta):
        from fem.ops.ssm.mix_token import mix_token  # by Triton, which the library does not require

        return mix_token(mixing, terms, beta)
    over_channels = lambda x: torch.einsum("hjk,bthk->bthj", mixing, x)  # noqa: E731
    if terms.mean.shape[1] == 1 and torch.compiler.is_compiling():  # which fuses sums, and no products
        over_channels = lambda x: (mixing * x.unsqueeze(-2)).sum(-1)  # noqa: E731
    log_weight = terms.log_weight.clamp_min(LOG_ZERO)
    peak = log_weight.detach().amax(-1, keepdim=True)
    weight = (log_weight - peak).exp()
    total = over_channels(weight)
    mean = over_channels(weight * terms.mean) / total
    log_total = torch.where(peak > NO_WEIGHT, total.log() + peak, -torch.inf)
    if not beta.shape[-1]:
        return Terms(log_total, mean, terms.free_energy)
    lift = beta * terms.free_energy
    top = lift.detach().amax(-1, keepdim=True)
    z = lift - top
    is_near = (z.detach() >= -1).all(-1, keepdim=True)
    energy = log_weight - peak + z
    highest = energy.detach().amax(-1, keepdim=True)
    summed = over_channels(torch.where(is_near, weight * torch.expm1(z), (energy - highest).exp())) / total
    far = summed.clamp(min=torch.finfo(summed.dtype).tiny).log() + highest
    return Terms(log_total, mean, (top + torch.where(is_near, torch.log1p(summed), far)) / beta)
