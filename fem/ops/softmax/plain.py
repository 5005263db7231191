"""Mean and free energy from one attention call, proven exact entry by entry.

    c_j = max_i v_ij        e = exp(beta (v - c))        [mean | R] = p @ [v | e]        F = c + log(R) / beta

Underflow takes at most 2 T e^-87 from R in float32, so an entry with R >= e^-60 is exact (e^-600 in float64). Any other
is computed again: with its whole head in float64, or alone from the definition. In channels where
beta (max v - min v) is small, e is exp(.) - 1 and log(R) is log(1 + R): they keep the digits that a small beta needs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from fem.ops.common.precision import LEAST_PROVEN
from fem.ops.softmax import entries as softmax_entries
from fem.ops.softmax.entries import Entries
from fem.ops.softmax.scores import Scores

_SMALL_SPAN = 1.0


class Gradients(NamedTuple):
    q: Float[Tensor, "b tq h d"]
    k: Float[Tensor, "b t h d"]
    v: Float[Tensor, "b t h dv"]
    beta: Float[Tensor, "#b 1 h dv"]
    scores: Float[Tensor, "b h tq t"] | None


class FreeEnergyRead:
    """The read of values under scores at temperatures beta, all in one dtype, float32 or float64.

    values: [v | e | zeros], and zeros where no row may look. shift: c. span: max v - min v of each channel.
    """

    def __init__(
        self,
        scores: Scores,
        values: Float[Tensor, "b t h w"],
        beta: Float[Tensor, "#b 1 h dv"],
        shift: Float[Tensor, "b 1 h dv"],
        span: Float[Tensor, "b 1 h dv"],
    ):
        self.scores, self.values, self.beta, self.shift, self.span = scores, values, beta, shift, span
        small = span * beta < _SMALL_SPAN
        self.small = small if bool(small.any()) else None
        self.empty = scores.empty_rows()

    @classmethod
    def of(cls, scores: Scores, v: Float[Tensor, "b t h dv"], beta: Float[Tensor, "#b 1 h dv"]) -> FreeEnergyRead:
        hidden, low, high = scores.hidden_keys(), v, v
        if hidden is not None:
            low, high = v.masked_fill(hidden, torch.inf), v.masked_fill(hidden, -torch.inf)
        shift = high.amax(1, keepdim=True)
        span = shift - low.amin(1, keepdim=True)
        if hidden is not None:
            shift.masked_fill_(torch.isneginf(shift), 0.0)
        channels = v.shape[-1]
        values = v.new_empty(*v.shape[:3], scores.width(2 * channels))
        read = cls(scores, values, beta, shift, span)
        read._first(values).copy_(v)
        read._second(values).copy_(read._exp_((v - shift).mul_(beta)))
        values[..., 2 * channels :] = 0.0
        if hidden is not None:
            values.masked_fill_(hidden, 0.0)
        return read

    def in_float64(self) -> FreeEnergyRead:
        return FreeEnergyRead.of(self.scores.double(), self._first(self.values).double(), self.beta.double())

    def forward(
        self,
    ) -> tuple[Float[Tensor, "b tq h w"], Float[Tensor, "b tq h dv"], Float[Tensor, "b tq h"], int]:
        """[mean | R | zeros], F, lse, and how many entries were computed again."""
        out, lse = self.scores.attend(self.values)
        total = self._second(out)
        free_energy = self._log_(total.clone(memory_format=torch.contiguous_format)).div_(self.beta).add_(self.shift)
        if self.empty is not None:
            free_energy.masked_fill_(self.empty, 0.0)
        entries = self._unproven(total)
        if entries is None:
            return out, free_energy, lse, 0
        batch, head, row, channel = entries.unbind(1)
        free_energy[batch, row, head, channel] = self._again(entries).to(out.dtype)
        return out, free_energy, lse, len(entries)

    def backward(
        self,
        grad_mean: Float[Tensor, "b tq h dv"],
        grad_free: Float[Tensor, "b tq h dv"],
        out: Float[Tensor, "b tq h w"],
        lse: Float[Tensor, "b tq h"],
        with_scores: bool,
    ) -> Gradients:
        """Gradients of q, k, v, beta, and of every score if wanted; `out` and `lse` are what `forward` returned.

            dR = dF / (beta R)        de = p^T dR        dv = p^T dmean + beta e de
            dbeta = sum_i e de (v - m) - sum_t dF (F - m) / beta

        for any m; the mean of the free energies as m keeps most digits.
        """
        entries = self._unproven(self._second(out))
        if entries is not None or self.empty is not None:
            out = out.clone()
        grad, total = torch.empty_like(out), self._second(out)
        g = torch.div(grad_free, self.beta, out=self._second(grad))
        if self.empty is not None:
            g.masked_fill_(self.empty, 0.0)
            total.masked_fill_(self.empty, 1.0)
        if entries is not None:
            batch, head, row, channel = entries.unbind(1)
            g[batch, row, head, channel] = 0.0
            total[batch, row, head, channel] = 1.0
        below = self._log_(self._first(grad).copy_(total)).div_(self.beta)
        middle = below.mean(1, keepdim=True)
        of_rows = self._per_channel(below.sub_(middle).mul_(g))
        g.div_(self._slope(total))
        self._first(grad).copy_(grad_mean)
        grad[..., 2 * grad_mean.shape[-1] :] = 0.0

        dq, dk, dvalues, ds = self.scores.attend_backward(grad, self.values, out, lse, with_scores)
        dz = self._second(dvalues).mul_(self._slope(self._second(self.values)))
        of_keys = self._per_channel((self._first(self.values) - self.shift).sub_(middle).mul_(dz))
        dv = torch.addcmul(self._first(dvalues), dz, self.beta)
        gradients = Gradients(dq, dk, dv, of_keys - of_rows, ds)
        if entries is not None:
            self._add_again(entries, grad_free[batch, row, head, channel].double(), gradients)
        return gradients

    def _first(self, both: Tensor) -> Tensor:
        return both[..., : self.shift.shape[-1]]

    def _second(self, both: Tensor) -> Tensor:
        channels = self.shift.shape[-1]
        return both[..., channels : 2 * channels]

    def _exp_(self, z: Tensor) -> Tensor:
        """e from z, in place."""
        return z.exp_() if self.small is None else z.copy_(torch.where(self.small, z.expm1(), z.exp()))

    def _log_(self, e: Tensor) -> Tensor:
        """z from e, in place."""
        return e.log_() if self.small is None else e.copy_(torch.where(self.small, e.log1p(), e.log()))

    def _slope(self, e: Tensor) -> Tensor:
        """exp(z) from e."""
        return e if self.small is None else torch.where(self.small, e + 1.0, e)

    def _per_channel(self, gradient: Tensor) -> Float[Tensor, "#b 1 h dv"]:
        return gradient.sum((0, 1) if len(self.beta) == 1 else 1, keepdim=True)

    def _unproven(self, total: Float[Tensor, "b tq h dv"]) -> Entries | None:
        """The entries that R does not prove; None: there are none."""
        if total.numel() == 0 or total.amin(1).amin() >= LEAST_PROVEN[total.dtype]:
            return None
        unproven = total < LEAST_PROVEN[total.dtype]
        for settled in (self.small, self.empty):
            if settled is not None:
                unproven &= ~settled
        entries = unproven.transpose(1, 2).nonzero()
        return entries if len(entries) else None

    def _again(self, entries: Entries) -> Float[Tensor, " n"]:
        if not self._prefers_whole_heads(entries):
            return softmax_entries.free_energies(self.scores, self._first(self.values), self.beta, entries)
        read, _, _, place = self._of_heads(entries)
        return read.forward()[1][place]

    def _add_again(self, entries: Entries, grad: Float[Tensor, " n"], to: Gradients) -> None:
        if not self._prefers_whole_heads(entries):
            softmax_entries.add_gradients(
                self.scores, self._first(self.values), self.beta, entries, grad, *to[:4],
                None if to.scores is None else _adding_to(to.scores),
            )  # fmt: skip
            return
        read, batch, head, place = self._of_heads(entries)
        out, free_energy, lse, _ = read.forward()
        nothing = torch.zeros_like(free_energy)
        grad_free = nothing.index_put(place, grad)
        more = read.backward(nothing, grad_free, out, lse, to.scores is not None)
        for total, part in zip(to[:3], more[:3]):
            total[batch, :, head] += part[:, :, 0].to(total.dtype)
        to.beta[0, 0].index_add_(0, head, more.beta[:, 0, 0].to(to.beta.dtype))
        if to.scores is not None:
            to.scores[batch, head] += more.scores[:, 0].to(to.scores.dtype)

    def _prefers_whole_heads(self, entries: Entries) -> bool:
        """Whether float64 attention over the heads concerned costs less than the entries one by one."""
        if self.values.dtype == torch.float64:
            return False
        heads = len(entries[:, :2].unique_consecutive(dim=0))
        return len(entries) > heads * self.scores.q.shape[1]

    def _of_heads(self, entries: Entries) -> tuple[FreeEnergyRead, Tensor, Tensor, tuple[Tensor, ...]]:
        """The read in float64 of the heads that hold the entries, these heads, and where the entries are in it."""
        heads, place = entries[:, :2].unique_consecutive(dim=0, return_inverse=True)
        batch, head = heads.unbind(1)
        v = self._first(self.values)[batch, :, head][:, :, None].double()
        beta = self.beta[0, 0, head][:, None, None].double()
        read = FreeEnergyRead.of(self.scores.of_heads(batch, head), v, beta)
        return read, batch, head, (place, entries[:, 2], torch.zeros_like(place), entries[:, 3])


def _adding_to(ds: Float[Tensor, "b h tq t"]) -> softmax_entries.AddScores:
    def add(batch: int, head: int, rows: Tensor, more: Tensor) -> None:
        ds[batch, head, rows, : more.shape[1]] += more.to(ds.dtype)

    return add
