"""What a prior reads from its memory."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

NO_WEIGHT = -1e29  # a logarithm below stands for no weight at all, however an op writes that


class Read(NamedTuple):
    """Mean and free energy of the values under a prior.

        mean_tj = sum_i p_t(i) v_ij        F_tj = (1 / beta_j) log sum_i p_t(i) exp(beta_j v_ij)        (Eq. 4)

    Both are (B, T, H, d_v); there is no free energy without a beta.
    """

    mean: Tensor
    free_energy: Tensor | None


class Terms(NamedTuple):
    """A read together with the logarithm of the total weight it was averaged over, so that reads can be merged.

    log_weight = log sum_i s(i), hugely negative (or -inf) for nothing; it broadcasts against the other two.
    """

    log_weight: Tensor
    mean: Tensor
    free_energy: Tensor | None


def merge(one: Terms, other: Terms, beta: Tensor | None) -> Terms:
    """The read over two disjoint supports together.

    share = w_2 / (w_1 + w_2)        mean = (1 - share) mean_1 + share mean_2
    F = (1/beta) log((1 - share) e^{beta F_1} + share e^{beta F_2})
    """
    lowest = torch.finfo(one.log_weight.dtype).min / 4
    gain = other.log_weight.clamp_min(lowest) - one.log_weight.clamp_min(lowest)
    weight = torch.logaddexp(one.log_weight, other.log_weight)
    mean = torch.lerp(one.mean, other.mean, torch.sigmoid(gain).expand_as(one.mean))
    if beta is None:
        return Terms(weight, mean, None)
    base = torch.where(gain > 0, other.free_energy, one.free_energy)  # so that a light addition is not rounded away
    stays = F.logsigmoid(-gain) + beta * (one.free_energy - base)
    enters = F.logsigmoid(gain) + beta * (other.free_energy - base)
    return Terms(weight, mean, base + torch.logaddexp(stays, enters) / beta)


def read_of(terms: Terms, beta: Tensor | None, normalize: bool, dtype: torch.dtype) -> Read:
    """Mean and free energy of terms; unnormalised those of the sums: sum s v and (1/beta) log sum s e^{beta v}."""
    log_weight, mean, free_energy = terms
    if not normalize:
        mean = mean * log_weight.exp()
        if beta is not None:
            free_energy = free_energy + log_weight.where(log_weight > NO_WEIGHT, 0) / beta
    return Read(mean.to(dtype), None if beta is None else free_energy.to(dtype))


def mix_channels(mixing: Tensor, terms: Terms, beta: Tensor | None) -> Terms:
    """The read over pairs (i, k) of token and channel, weighted M_jk w_k(i), from the reads of the channels.

    w_j = sum_k M_jk w_k        mean_j = sum_k M_jk w_k mean_k / w_j
    F_j = (1 / beta) log sum_k M_jk w_k e^{beta F_k} / w_j                                       (Section 2.3.3 iv)

    mixing (H, d_v, d_v) > 0; terms (B, T, H, d_v); beta (H, 1) or (H, d_v), equal within a head.
    """
    over_channels = lambda x: torch.einsum("hjk,bthk->bthj", mixing, x)  # noqa: E731
    lowest = torch.finfo(terms.log_weight.dtype).min / 4
    log_weight = terms.log_weight.clamp_min(lowest)
    peak = log_weight.detach().amax(-1, keepdim=True)
    weight = (log_weight - peak).exp()
    total = over_channels(weight)
    mean = over_channels(weight * terms.mean) / total
    log_total = torch.where(peak > lowest, total.log() + peak, -torch.inf)
    if beta is None:
        return Terms(log_total, mean, None)
    energy = log_weight - peak + beta * terms.free_energy
    highest = energy.detach().amax(-1, keepdim=True)
    free_energy = (over_channels((energy - highest).exp()).log() + highest - total.log()) / beta
    return Terms(log_total, mean, free_energy)
