"""Sums over the past of terms of any magnitude, in numbers that neither overflow nor vanish. No autograd here.

    m_t = max(m_{t-1} + a_t, x_t)        S_t = e^{m_{t-1} + a_t - m_t} S_{t-1} + e^{x_t - m_t} (1, v_t)

so that S_t e^{m_t} = sum_{i <= t} exp(x_i + sum_{i<r<=t} a_r) (1, v_i). A read keeps two such streams: the weights
x with the payload (1, v), and the energies x + beta v. The peak m falls with the decays, so that later terms do not
underflow beside a spike that has decayed away. Where nothing was added yet, m is LOG_ZERO, v averages to 0, and S has
no meaning. Gradients flow through S at a fixed m, which is exact for whatever depends on S e^m alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fem.ops.common.read import LOG_ZERO, NO_WEIGHT, merge_energies
from fem.ops.common.recurrence import adjoint_sums, running_peaks, running_sums


class Sums(NamedTuple):
    """One stream: peak (B, T, C), and sums (1 or 2, B, T, C) of e^{x - peak} and, with a payload, e^{x - peak} v."""

    peak: Tensor
    sums: Tensor

    def rounded(self, dtype: torch.dtype) -> Sums:
        """In another dtype; the sums are corrected for the rounding of the peak."""
        peak = self.peak.clamp(min=LOG_ZERO).to(dtype)
        return Sums(peak, (self.sums * (self.peak - peak).clamp(-1, 1).exp()).to(dtype))


class Streams(NamedTuple):
    """The two streams of a read; without a beta there are no energies."""

    weights: Sums
    energies: Sums | None = None

    @classmethod
    def of(cls, parts: list[Tensor]) -> Streams:
        return cls(*(Sums(*stream) for stream in zip(parts[::2], parts[1::2])))

    def parts(self) -> list[Tensor]:
        return [part for stream in self if stream is not None for part in stream]

    @classmethod
    def after(cls, peak: Tensor, sums: Tensor, free_energy: Tensor | None = None, *, beta: Tensor | None) -> Streams:
        """The streams of a past whose weights are (peak, sums) and whose values have this free energy."""
        if beta is None:
            return cls(Sums(peak, sums))
        lift = beta * free_energy
        top, rounding = added(peak, lift.detach())
        energy = sums[0] * (rounding + (lift - lift.detach())).exp()  # gradients flow through the sums alone
        return cls(Sums(peak, sums), Sums(top, energy.unsqueeze(0)))

    def last(self) -> Streams:
        """After the last token."""
        return Streams(*(stream and Sums(stream.peak[:, -1].clone(), stream.sums[:, :, -1].clone()) for stream in self))


def start_of(state: dict[str, Tensor] | None, beta: Tensor | None, like: Tensor) -> list[Tensor]:
    """What comes before the first token: the peak (B, C), the sums (2, B, C) and, with a beta, the free energy (B, C).

    like (B, C): of the shape and dtype wanted. state: None at the start of a sequence.
    """
    if state is None:
        zero = torch.zeros_like(like)
        return [torch.full_like(like, LOG_ZERO), torch.stack([zero + 1, zero]), *([] if beta is None else [zero])]
    dims = state["peak"].ndim - 1
    sums = torch.stack([state["total"], state["weighted"]])
    parts = [state["peak"], sums, *([] if beta is None else [state["free_energy"]])]
    return [part.to(like.dtype).flatten(-dims) for part in parts]


def state_of(weights: Sums, free_energy: Tensor | None = None) -> dict[str, Tensor]:
    """What a scan returns as its state; `start_of` reads it."""
    total, weighted = weights.sums.unbind(0)
    state = {"peak": weights.peak, "total": total, "weighted": weighted}
    return state if free_energy is None else {**state, "free_energy": free_energy}


class Memory(NamedTuple):
    """The past as a token reads it: its weight total e^peak, and the mean and free energy of its values."""

    peak: Tensor
    total: Tensor
    mean: Tensor
    free_energy: Tensor | None = None

    def parts(self) -> list[Tensor]:
        return [part for part in self if part is not None]


class Adjoint(NamedTuple):
    """Gradients of a stream's inputs; `added` is that of e^{x - peak}, whose value is `weight`."""

    log_decay: Tensor | None
    added: Tensor
    weight: Tensor
    v: Tensor | None
    start: Tensor


def added(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """The sum, and the rounding error that has to be added to it (Knuth's two-sum)."""
    total = one + other
    back = total - one
    rounding = (one - (total - back)) + (other - back)
    return total, torch.where(one > NO_WEIGHT, rounding, 0)


def accumulate(log_decay: Tensor | None, x: Tensor, v: Tensor | None, start: Sums) -> Sums:
    """The stream of the log-weights x and the payload v, which follows `start`."""
    peak = running_peaks(x.new_zeros(()).expand_as(x) if log_decay is None else log_decay, x, start.peak)
    peak.clamp_(min=LOG_ZERO)
    terms = x.new_empty(1 if v is None else 2, *x.shape)
    torch.sub(x, peak, out=terms[0]).exp_()
    if v is not None:
        torch.mul(terms[0], v, out=terms[1])
    sums = running_sums(_log_keep(log_decay, peak, start), terms, start.sums)
    sums[0].clamp_(min=0.5)  # at least about 1 unless nothing was added
    return Sums(peak, sums)


def accumulate_backward(
    grad: Tensor, log_decay: Tensor | None, x: Tensor, v: Tensor | None, start: Sums, after: Sums
) -> Adjoint:
    """Gradients of the inputs of `accumulate` from that of its sums."""
    log_keep = _log_keep(log_decay, after.peak, start)
    reach = adjoint_sums(log_keep, grad)
    d_start = log_keep[:, 0].exp() * reach[:, :, 0]
    d_decay = None
    if log_decay is not None:
        before = last_step(after.sums, start.sums)
        d_decay = before.mul_(reach).sum(0).mul_(log_keep.exp_())
    weight = (x - after.peak).exp_()
    if v is None:
        return Adjoint(d_decay, reach[0], weight, None, d_start)
    return Adjoint(d_decay, torch.addcmul(reach[0], v, reach[1]), weight, weight * reach[1], d_start)


def add_token(
    peak: Tensor, sums: Tensor, free_energy: Tensor | None = None, *, x: Tensor, v: Tensor, beta: Tensor | None
) -> list[Tensor]:
    """The peak, the sums and the free energy with one token of log-weight x and value v more. Differentiable."""
    top = torch.maximum(peak, x).detach().clamp(min=LOG_ZERO)
    before, weight = sums * (peak - top).exp(), (x - top).exp()
    total = (before[0] + weight).clamp(min=0.5)  # at least about 1 unless nothing was added
    after = [top, torch.stack([total, torch.addcmul(before[1], weight, v)])]
    if beta is None:
        return after
    gain = (x.clamp(min=LOG_ZERO) - peak.clamp(min=LOG_ZERO)) - sums[0].log()
    merged = merge_energies(gain, free_energy, v, beta)
    return [*after, torch.where(top > NO_WEIGHT, merged, 0)]


def start_backward(
    d_energy: Tensor, d_sums: Tensor, before: Streams, free_energy: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of the first free energy and, per entry, of beta, through the energies; d_sums grows in place."""
    through = (d_energy * before.energies.sums)[0]
    through = torch.where(before.weights.peak > NO_WEIGHT, through, 0)
    d_sums[0] += through / before.weights.sums[0]
    return beta * through, free_energy * through


def end_backward(d_free_energy: Tensor, d_sums: Tensor, after: Streams, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the last energies and, per entry, of beta, through the last free energy; d_sums grows in place."""
    share = torch.where(after.weights.peak > NO_WEIGHT, d_free_energy / beta, 0)
    d_sums[0] -= share / after.weights.sums[0]
    return share / after.energies.sums[0], -share * leave(after, beta).free_energy


def leave(streams: Streams, beta: Tensor | None) -> Memory:
    """mean = S_1 / S_0 of the weights, F = (1 / beta) log of energies over weights."""
    (peak, (total, weighted)), energies = streams
    mean, total = weighted / total, total.clone()  # a view of it would keep the memory of `weighted` alive
    if beta is None:
        return Memory(peak, total, mean)
    free_energy = (energies.sums[0] / total).log_().add_(energies.peak - peak).div_(beta)
    return Memory(peak, total, mean, free_energy)


def leave_backward(
    grad: Memory, memory: Memory, energy: Tensor | None, beta: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of the weights' sums, of the energies' and, per entry, of beta."""
    _, total, mean, free_energy = memory
    d_weights = total.new_empty(2, *total.shape)
    torch.div(grad.mean, total, out=d_weights[1])
    if grad.total is None:
        torch.mul(mean, d_weights[1], out=d_weights[0]).neg_()
    else:
        torch.addcmul(grad.total, mean, d_weights[1], value=-1, out=d_weights[0])
    if beta is None:
        return d_weights, None, None
    share = grad.free_energy / beta
    d_weights[0].addcdiv_(share, total, value=-1)
    return d_weights, (share / energy).unsqueeze(0), free_energy * share.neg_()


def last_step(tensor: Tensor, before: Tensor) -> Tensor:
    """Row t of what is returned is row t - 1 of the (.., T, C) tensor; the first is `before`."""
    return torch.cat([before.unsqueeze(-2), tensor[..., :-1, :]], -2)


def _log_keep(log_decay: Tensor | None, peak: Tensor, start: Sums) -> Tensor:
    """The decay of sums that are relative to the peak."""
    before = last_step(peak, start.peak)
    return (before if log_decay is None else before.add_(log_decay)).sub_(peak)
