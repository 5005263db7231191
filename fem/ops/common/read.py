"""The mean and the free energy that a row reads, and how reads over parts of the tokens are merged."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fem.ops.common.backend import may_look

_NEAR = 30.0  # exponents up to here go through exp itself, larger ones through logarithms
LOG_ZERO = -1e30  # the logarithm of no weight; finite, so that the difference of two of them is finite, too
NO_WEIGHT = LOG_ZERO / 10  # logarithms below it stand for no weight


class Read(NamedTuple):
    """Mean and free energy of the values under a prior.

        mean_tj = sum_i p_t(i) v_ij        F_tj = (1 / beta_j) log sum_i p_t(i) exp(beta_j v_ij)        (Eq. 4)

    Both are (B, T, H, d_v); there is no free energy without a beta.
    """

    mean: Tensor
    free_energy: Tensor | None


class Terms(NamedTuple):
    """A read together with the logarithm of the total weight it was averaged over, so that reads can be merged.

    log_weight = log sum_i s(i), LOG_ZERO (or -inf) where nothing was seen; it broadcasts against the other two.
    FlashInfer calls the pair (value, log-sum-exp) an attention state, and `merge` merge_state.
    """

    log_weight: Tensor
    mean: Tensor
    free_energy: Tensor


def read_free(v: Tensor, free_values: Tensor | None, beta: Tensor | None) -> tuple[Tensor, Tensor]:
    """The values whose free energy is read, and their temperatures: of no channel without a beta."""
    if beta is None:
        return v[..., :0], v.new_ones(v.shape[2], 0)
    return v if free_values is None else free_values, beta


def rounded(read: Read, dtype: torch.dtype, beta: Tensor | None) -> Read:
    """The read in a dtype; it has no free energy without a beta."""
    return Read(read.mean.to(dtype), None if beta is None else read.free_energy.to(dtype))


def connected_zeros(like: Tensor, shape: tuple[int, ...], *inputs: Tensor | None) -> Tensor:
    """Zeros that depend on the inputs, so that a call without a row or a token passes gradients of 0."""
    return like.new_zeros(shape) + sum(x.flatten()[:0].sum().to(like.dtype) for x in inputs if x is not None)


def beside(x: Tensor, y: Tensor) -> Tensor:
    """What belongs to each channel of y, of which there may be none: x has one entry for each, or one for all."""
    return x[..., : y.shape[-1]]


def merge(one: Terms, other: Terms, beta: Tensor) -> Terms:
    """The read over two disjoint supports together.

    share = w_2 / (w_1 + w_2)        mean = (1 - share) mean_1 + share mean_2
    F = (1/beta) log((1 - share) e^{beta F_1} + share e^{beta F_2})
    """
    gain = other.log_weight.clamp_min(LOG_ZERO) - one.log_weight.clamp_min(LOG_ZERO)
    weight = log_add(one.log_weight, other.log_weight)
    base, above, logit = _heavier_first(beside(gain, one.mean), one.mean, other.mean)
    mean = base + torch.sigmoid(logit) * above
    gain = beside(gain, one.free_energy)
    return Terms(weight, mean, merge_energies(gain, one.free_energy, other.free_energy, beta))


def _heavier_first(gain: Tensor, one: Tensor, other: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The heavier of the two, how far the lighter one is above it, and the logit of the lighter one's share, which is
    not rounded away.

    gain: the logit of the other's share. Triton fails at inductor's code for a choice of the lighter one itself.
    """
    heavier, above = gain > 0, other - one
    return torch.where(heavier, other, one), torch.where(heavier, -above, above), torch.where(heavier, -gain, gain)


def log(x: Tensor) -> Tensor:
    """log x; at 0 LOG_ZERO, without gradient, where it would be infinite."""
    positive = x > 0
    return torch.where(positive, torch.where(positive, x, 1).log(), LOG_ZERO)


def log_add(one: Tensor, other: Tensor) -> Tensor:
    """log(e^one + e^other). Unlike torch.logaddexp, its second derivative is finite where one of them is -inf."""
    top, low = torch.maximum(one, other), torch.minimum(one, other)
    return top - F.logsigmoid(torch.where(top > -torch.inf, top - low, 0))


def merge_energies(gain: Tensor, one: Tensor, other: Tensor, beta: Tensor) -> Tensor:
    """F = (1/beta) log((1 - share) e^{beta F_1} + share e^{beta F_2}), share = sigmoid(gain), at any beta > 0.

    F is computed as the heavier one's plus a difference, so that a light addition is not rounded away; by log1p and
    expm1 where both are near each other, so that a small beta does not magnify the rounding of a logarithm.
    """
    base, above, logit = _heavier_first(gain, one, other)
    lift = beta * above
    is_near = lift < _NEAR
    small = lift.clamp(max=_NEAR)
    grown = torch.where(small > -1, small.clamp(min=-1).expm1(), small.exp() - 1)  # expm1 loses its slope below -17
    near = torch.log1p(torch.sigmoid(logit) * grown)
    if _may_read_back(lift) and bool(is_near.all()):
        return base + near / beta
    far = log_add(F.logsigmoid(-logit), F.logsigmoid(logit) + lift)
    return base + torch.where(is_near, near, far) / beta


def _may_read_back(x: Tensor) -> bool:
    """Whether values of x may be read on the host to skip work, which is left undone under gradients."""
    return not torch.is_grad_enabled() and may_look(x)


def log_average(log_p: Tensor, y: Tensor, dim: int) -> Tensor:
    """log sum p e^y along dim, which is kept, for p that sum to 1. Where the y are nearly equal, no digit is lost."""
    seen = log_p > NO_WEIGHT
    top = torch.where(seen, y, -torch.inf).detach().amax(dim, keepdim=True)
    top = torch.where(top > -torch.inf, top, 0)
    z = torch.where(seen, y - top, 0)
    is_near = (z >= -1).all(dim, keepdim=True)
    near = torch.log1p((log_p.exp() * torch.expm1(z.clamp(min=-1))).sum(dim, keepdim=True))
    if _may_read_back(z) and bool(is_near.all()):
        return top + near
    far = torch.where(seen, log_p + z, NO_WEIGHT).logsumexp(dim, keepdim=True)
    return top + torch.where(is_near, near, far)


def read_of(terms: Terms, beta: Tensor, normalize: bool) -> Read:
    """Mean and free energy of terms; without normalize the sums instead: sum s v and (1/beta) log sum s e^{beta v}."""
    log_weight, mean, free_energy = terms
    if not normalize:
        mean = mean * beside(log_weight, mean).exp()
        free_energy = free_energy + beside(log_weight.where(log_weight > NO_WEIGHT, 0), beta) / beta
    return Read(mean, free_energy)
