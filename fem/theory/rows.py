"""Rows of a prior with their values, in float64, and the one quantity that everything else rests on.

With z_i = beta (v_i - mean), so that sum_i p_i z_i = 0,

    KL(p || q) = log sum_i p_i e^z_i = log(1 + sum_i p_i (e^z_i - 1 - z_i)),

whose terms are all >= 0: no digit is lost however small beta is, and F = mean + KL(p || q) / beta       (Eq. 6).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Real
from torch import Tensor

Along = Float[Tensor, "..."]
PerRead = Real[Tensor, "..."] | float | int

COLD = 1e150  # stands for beta = inf where a product must stay finite
_FLAT = 1e-75  # where all exponents are below it, the limit beta -> 0 is taken, before p z^2 can underflow
_EXP_MAX = 700.0  # exp of it is a finite float64


class Rows(NamedTuple):
    """Prior, values less their mean (tokens last, both zero outside the support), and the mean."""

    p: Tensor
    centred: Tensor
    mean: Tensor

    def exponents(self, beta: Tensor) -> Tensor:
        return beta.clamp_max(COLD)[..., None] * self.centred

    def kl_gap(self, beta: Tensor) -> Tensor:
        """KL(p || q)."""
        z = self.exponents(beta)
        shift = (z.amax(-1, keepdim=True) - _EXP_MAX).clamp_min(0).detach()
        near = torch.exp(-shift) * _exp_beyond_linear(z.clamp(-0.5, 0.5))
        far = torch.exp(z - shift) - torch.exp(-shift) * (1 + z)
        excess = (self.p * torch.where(z.abs() < 0.5, near, far)).sum(-1)
        is_far = shift > 0  # then 1 + excess would lose a top token of p < 1e-16
        total = torch.where(is_far, (self.p * torch.exp(z - shift)).sum(-1, keepdim=True), 1)
        beyond = torch.where(is_far, 0, excess[..., None])
        return (shift + torch.where(is_far, total.log(), torch.log1p(beyond)))[..., 0]

    def kl_from_prior(self, beta: Tensor) -> Tensor:
        """KL(q || p)."""
        z, gap = self.exponents(beta), self.kl_gap(beta)
        top = z.amax(-1, keepdim=True)
        total = (self.p * torch.exp(z - top)).sum(-1, keepdim=True)
        mild = torch.where(self.p > 0, z - gap[..., None], 0)  # log(q / p)
        steep = torch.where(self.p > 0, z - top - torch.where(total > 0, total, 1).log(), 0)
        small = (self.p * mild * torch.expm1(mild)).sum(-1) - gap
        return torch.where(z.abs().amax(-1) < 1, small, (self.p * steep * torch.exp(steep)).sum(-1))

    def gain(self, beta: Tensor) -> Tensor:
        """F - mean."""
        flat = self.exponents(beta).abs().amax(-1) < _FLAT
        beta = beta.clamp_max(COLD)
        slope_at_0 = (self.p * self.centred.square()).sum(-1) / 2
        return torch.where(flat, beta * slope_at_0, self.kl_gap(beta) / torch.where(flat, 1, beta))

    def posterior(self, beta: Tensor) -> Tensor:
        z = self.exponents(beta)
        weight = self.p * torch.exp(z - z.amax(-1, keepdim=True))
        total = weight.sum(-1, keepdim=True)
        return weight / torch.where(total > 0, total, 1)


def checked_rows(p: Tensor, v: Tensor, dim: int, **per_read: PerRead) -> tuple[Rows | Tensor, ...]:
    """The rows of p and v, then each of `per_read` as a float64 tensor: >= 0, and `lam` <= 1.

    Raises ValueError naming the argument on shapes that do not broadcast, on values out of range and on NaN.
    """
    check_tensors(p=p, v=v)
    rows = _rows(p, v, dim)
    return rows, *(_checked(name, value, rows) for name, value in per_read.items())


def check_tensors(**tensors: Tensor) -> None:
    """Raise TypeError unless all are floating-point tensors."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, got a {type(tensor).__name__}.")
        if not tensor.is_floating_point():
            raise TypeError(f"{name} must be floating point, got dtype {tensor.dtype}.")


def as_given(result: Tensor, p: Tensor, v: Tensor, dim: int | None = None) -> Tensor:
    """The result in the inputs' dtype and, with a `dim`, its tokens where the inputs have them."""
    if dim is not None:
        result = result.movedim(-1, dim if dim < 0 else dim - max(p.ndim, v.ndim))
    return result.to(torch.promote_types(p.dtype, v.dtype))


def shown(tensor: Tensor) -> str:
    return "NaN" if tensor.isnan().any() else f"values from {tensor.min():.4g} to {tensor.max():.4g}"


def _rows(p: Tensor, v: Tensor, dim: int) -> Rows:
    """Raises ValueError unless p >= 0 sums to 1 along dim, or to 0 where a row has no support; no NaN."""
    rounding = torch.finfo(p.dtype).eps
    try:
        p, v = torch.broadcast_tensors(p.double(), v.double())
    except RuntimeError:
        raise ValueError(f"p and v must broadcast, got shapes {tuple(p.shape)} and {tuple(v.shape)}.") from None
    if not isinstance(dim, int) or not -p.ndim <= dim < p.ndim:
        raise ValueError(f"dim must be an axis of p and v, of shape {tuple(p.shape)}, got {dim}.")
    p, v = p.movedim(dim, -1), v.movedim(dim, -1)
    if p.shape[-1] == 0:
        raise ValueError(f"p must hold at least one token along dim, got shape {tuple(p.shape)} with dim last.")
    if _readable(p):
        if not (p >= 0).all():
            raise ValueError(f"p must hold weights >= 0 that sum to 1, got {shown(p)}; pass probabilities, not logits.")
        total = p.sum(-1)
        if not (((total - 1).abs() <= 1e-3 + 8 * rounding * p.shape[-1] ** 0.5) | (total == 0)).all():
            raise ValueError(
                f"p must sum to 1 over the tokens (or to 0: no support), got sums with {shown(total)}; "
                "divide by the sum, or name the tokens' axis as dim."
            )
    p, v = torch.where(p > 0, p, 0), torch.where(p > 0, v, 0)
    heaviest = v.gather(-1, p.argmax(-1, keepdim=True))
    mean = heaviest + (p * (v - heaviest)).sum(-1, keepdim=True)
    return Rows(p, torch.where(p > 0, v - mean, 0), mean[..., 0])


def _checked(name: str, value: PerRead, rows: Rows) -> Tensor:
    if not isinstance(value, (Tensor, int, float)) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number or a tensor, got a {type(value).__name__}.")
    value = torch.as_tensor(value, dtype=torch.float64, device=rows.mean.device)
    try:
        torch.broadcast_shapes(value.shape, rows.mean.shape)
    except RuntimeError:
        wanted, got = tuple(rows.mean.shape), tuple(value.shape)
        raise ValueError(f"{name} must broadcast to the result's shape {wanted}, got {got}.") from None
    if _readable(value):
        if name == "lam" and not ((value >= 0) & (value <= 1)).all():
            raise ValueError(f"lam must lie in [0, 1], got {shown(value)}; pass it through a sigmoid first.")
        if not (value >= 0).all():
            raise ValueError(f"{name} must be >= 0, got {shown(value)}; pass it through a softplus first.")
    return value


def _exp_beyond_linear(z: Tensor) -> Tensor:
    """e^z - 1 - z for |z| <= 1/2, to the last digit."""
    series = torch.ones_like(z)
    for k in range(16, 2, -1):
        series = 1 + series * z / k
    return series * z.square() / 2


def _readable(tensor: Tensor) -> bool:
    """True if values may be read on the host: outside of graphs and of torch.func's transforms."""
    plain = not torch.compiler.is_compiling() and torch._C._functorch.maybe_current_level() is None
    return plain and tensor.device.type == "cpu"
