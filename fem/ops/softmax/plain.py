"""Mean and free energy from one attention call in one dtype, with gradients by hand; see `packing`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fem.ops.common.packing import Packing
from fem.ops.common.precision import LEAST_PROVEN
from fem.ops.softmax.scores import Scores


class Gradients(NamedTuple):
    q: Float[Tensor, "b tq h d"]
    k: Float[Tensor, "b t h d"]
    values: Float[Tensor, "b t h w"]  # of [v | f], and of what is behind them
    beta: Float[Tensor, "#b 1 h df"]
    scores: Float[Tensor, "b h tq t"] | None


class PairRead:
    """The mean of v (B, T, H, d_v) and the free energy of f (B, T, H, d_f) at temperatures beta (#B, 1, H, d_f).

    values: [v | e | zeros], and zeros where no row may look. What else the backward needs is computed again, as memory
    is fullest while attention's own gradients are made. f is copied for its minimum and maximum, which take six times
    as long over a slice of a head's channels.
    """

    def __init__(self, scores: Scores, v: Tensor, f: Tensor, beta: Tensor):
        self.scores, self.v, self.f = scores, v, f
        self.empty, self.hidden = scores.empty_rows(), scores.hidden_keys()
        self.packing = Packing.of(f.contiguous(), beta, self.hidden)
        self.values = self._both(v, self.packing.energies(self._away().mul_(beta)))
        if self.hidden is not None:
            self.values.masked_fill_(self.hidden, 0.0)

    def forward(
        self,
    ) -> tuple[Float[Tensor, "b tq h w"], Float[Tensor, "b tq h df"], Float[Tensor, "b tq h"], Bool[Tensor, "..."]]:
        """[mean | R | zeros], with 1 for an R that proves nothing; F; lse; and which F are not proven, which are c."""
        out, lse = self.scores.attend(self.values)
        total = self._energy(out).contiguous()
        if self.empty is None and total.numel() and total.amin().item() >= LEAST_PROVEN[total.dtype]:
            doubtful = torch.zeros(total.shape, dtype=torch.bool, device=total.device)  # in an eighth of the time
        else:
            doubtful = self.packing.doubtful(total)
            unread = doubtful if self.empty is None else doubtful | self.empty
            total.masked_fill_(unread, 1.0)
            self._energy(out).copy_(total)
        free_energy = self.packing.logarithm(total).div_(self.packing.beta).add_(self.packing.shift)
        if self.empty is not None:
            free_energy.masked_fill_(self.empty, 0.0)
            doubtful &= ~self.empty
        return out, free_energy, lse, doubtful

    def backward(self, grad_mean: Tensor, grad_free: Tensor, out: Tensor, lse: Tensor, with_scores: bool) -> Gradients:
        """Gradients of q, k, v, f, beta, and of every score if wanted; `out` and `lse` are what `forward` returned.

            dR = dF / (beta R)        de = p^T dR        df = beta e de        dv = p^T dmean
            dbeta = sum_i e de (f - m) - sum_t dF (F - m) / beta

        for any m; the mean of the free energies as m keeps most digits. dF is 0 where F is not proven.
        """
        beta, total = self.packing.beta, self._energy(out).contiguous()
        g, below = grad_free / beta, self.packing.logarithm(total).div_(beta)
        if self.empty is not None:
            for x in g, below:
                x.masked_fill_(self.empty, 0.0)
        middle = below.mean(1, keepdim=True)
        of_rows = self._per_channel(below.sub_(middle).mul_(g))
        grad = self._both(grad_mean, g.div_(self.packing.slope(total)))
        del g, below, total
        dq, dk, dvalues, ds = self.scores.attend_backward(grad, self.values, out, lse, with_scores)
        del grad
        dz = self._energy(dvalues).mul_(self.packing.slope(self._energy(self.values)))
        of_keys = self._per_channel(self._away().sub_(middle).mul_(dz))
        dz.mul_(beta)
        return Gradients(dq, dk, dvalues, of_keys - of_rows, ds)

    def _away(self) -> Float[Tensor, "b t h df"]:
        """f - c, 0 where no row may look."""
        away = self.f - self.packing.shift
        return away if self.hidden is None else away.masked_fill_(self.hidden, 0.0)

    def _both(self, one: Float[Tensor, "b t h dv"], other: Float[Tensor, "b t h df"]) -> Float[Tensor, "b t h w"]:
        """[one | other | zeros], as wide as q and k at least (flash attention); copies take 2/3 of torch.cat's time."""
        width = one.shape[-1] + other.shape[-1]
        both = one.new_empty(*one.shape[:3], max(width, self.scores.q.shape[-1]))
        both[..., width:] = 0.0
        both[..., : one.shape[-1]] = one
        self._energy(both).copy_(other)
        return both

    def _energy(self, both: Tensor) -> Tensor:
        return both[..., self.v.shape[-1] : self.v.shape[-1] + self.f.shape[-1]]

    def _per_channel(self, gradient: Tensor) -> Float[Tensor, "#b 1 h df"]:
        return gradient.sum((0, 1) if self.packing.beta.shape[0] == 1 else 1, keepdim=True)
