"""The softmax read as one differentiable op, by blocks of queries against the keys that they can see.

Where causality and masked keys are all that restricts the pairs, or there is but one block, one call reads everything.
Tokens that hold NaN or inf are set aside first, so that they reach the rows that see them and no other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from fem.ops.common import flops
from fem.ops.common.fallback_count import fallbacks
from fem.ops.common.precision import SMALLEST_BETA, compute_dtype
from fem.ops.common.read import Read
from fem.ops.common.transforms import again_differentiable, transformed
from fem.ops.softmax.differentiable import differentiable_read
from fem.ops.softmax.plain import FreeEnergyRead, Gradients
from fem.ops.softmax.scores import Scores
from fem.ops.softmax.support import Intervals

ROWS = 256  # queries of a block: few enough that a window of as many keys is most of what they see
_HUGE_SCORES = 1e9
_LARGE_SCORES = 200.0  # nats: exp(s - lse) from a rounded lse is then off by more than 2e-5
_FEW_SCORES = 700  # of a head: little to compute, and of one or two likely keys a gradient is all rounding error


def free_energy_read(
    q: Float[Tensor, "b tq h dk"],
    k: Float[Tensor, "b t hkv dk"],
    v: Float[Tensor, "b t hkv dv"],
    beta: Float[Tensor, "hkv dv"] | None,
    bias: Float[Tensor, "#b #h #tq #t"] | None,
    keep: Bool[Tensor, "b t"] | None,
    seen: Intervals | None,
    causal: bool,
    scale: float,
    flash: bool,
) -> Read:
    """Mean and free energy, in float32 at least. seen: what a query sees besides `keep`; None: all, i <= t if causal.

    flash: by torch's flash attention on a CPU instead of materialised scores.
    """
    first, end = (None, None) if seen is None else seen
    if transformed(q, k, v, beta, bias):
        dtype = compute_dtype(q)
        read = differentiable_read(q, k, v, beta, bias, keep, first, end, causal, scale)
        return Read(read[0].to(dtype), None if beta is None else read[1].to(dtype))
    mean, free_energy, _ = _Read.apply(q, k, v, beta, bias, keep, first, end, causal, scale, flash)
    return Read(mean, None if beta is None else free_energy)


class _Block(NamedTuple):
    """Some queries, the keys that any of them sees, and which results depend on a token that is not finite."""

    rows: slice
    keys: slice
    scores: Scores
    v: Float[Tensor, "b t h dv"]
    poisoned: Bool[Tensor, "b tq h #dv"] | None


class _Call:
    """The tensors of a read, with as many key heads as query heads, and its blocks.

    careful: whether some are not finite, or so large that scores and sums need float64; the backward then computes the
    block again instead of using a rounded lse.
    """

    def __init__(self, q, k, v, beta, bias, keep, first, end, causal, scale, flash):
        self.heads, dtype = q.shape[2], compute_dtype(q)
        q, k, v = q.to(dtype), self._per_head(k, 2).to(dtype), self._per_head(v, 2).to(dtype)
        self.bad, double = None, False
        if not _harmless(q, k, v, scale):
            q, k, v, self.bad = _set_aside(q, k, v, keep)
            double = not _harmless(q, k, v, scale)
        self.careful = self.bad is not None or double
        dtype = torch.float64 if double else dtype
        self.q, self.k, self.v = q.to(dtype), k.to(dtype), v.to(dtype)
        self.beta = None if beta is None else self._per_head(beta, 0).to(dtype)[None, None]
        self.bias = None if bias is None else bias.to(dtype)
        self.keep, self.causal, self.scale, self.flash = keep, causal, scale, flash and not double
        self.seen = None if first is None else Intervals(first, end)
        if self.careful and self.seen is None:
            row = torch.arange(q.shape[1], device=q.device)[None]
            self.seen = Intervals(torch.zeros_like(row), row + 1 if causal else torch.full_like(row, k.shape[1]))

    def _per_head(self, x: Tensor, dim: int) -> Tensor:
        groups = self.heads // x.shape[dim]
        return x.repeat_interleave(groups, dim) if groups > 1 else x

    def blocks(self) -> Iterator[_Block]:
        queries, keys = self.q.shape[1], self.k.shape[1]
        if self.seen is None:
            everything = slice(0, queries), slice(0, keys)
            mask = self._mask(None if self.keep is None else self.keep[:, None, None], *everything)
            scores = Scores(self.q, self.k, mask, self.causal, self.scale, self.flash)
            yield _Block(*everything, scores, self.v, None)
            return
        low, high = self.seen.first.amin(0).tolist(), self.seen.end.amax(0).tolist()
        for start in range(0, queries, ROWS):
            rows = slice(start, min(start + ROWS, queries))
            begin = min(low[start], keys - 1)  # rows that see no key, and begin behind the last, get one that is masked
            seen = slice(begin, max(high[rows.stop - 1], begin + 1))
            index = torch.arange(seen.start, seen.stop, device=self.q.device)
            first, end = (x[:, None, rows, None] for x in self.seen)
            allowed = (first <= index) & (index < end)
            if self.keep is not None:
                allowed = allowed & self.keep[:, None, None, seen]
            mask = self._mask(None if bool(allowed.all()) else allowed, rows, seen)
            scores = Scores(self.q[:, rows], self.k[:, seen], mask, False, self.scale, self.flash)
            yield _Block(rows, seen, scores, self.v[:, seen], self._poisoned(allowed, rows, seen))

    def bias_of(self, rows: slice, keys: slice, of: Tensor) -> Tensor:
        """The part of the bias, or of something of its shape, that belongs to a block."""
        return of[:, :, rows if of.shape[2] > 1 else slice(None), keys if of.shape[3] > 1 else slice(None)]

    def _mask(self, allowed: Bool[Tensor, "#b 1 #tq t"] | None, rows: slice, keys: slice) -> Tensor | None:
        """What is added to the scores: the bias, -inf where a key is not allowed; None: nothing."""
        bias = None if self.bias is None else self.bias_of(rows, keys, self.bias)
        if allowed is not None:
            return torch.where(allowed, self.q.new_zeros(()) if bias is None else bias, -torch.inf)
        return None if bias is None else bias.expand(*bias.shape[:3], keys.stop - keys.start)

    def _poisoned(self, allowed: Tensor, rows: slice, keys: slice) -> Bool[Tensor, "b tq h #dv"] | None:
        if self.bad is None:
            return None
        of_query, of_key = (x.transpose(1, 2) for x in self.bad)
        allowed = allowed.expand(len(self.q), self.heads, -1, -1)
        if self.bias is not None:
            allowed = allowed & ~torch.isneginf(self._mask(None, rows, keys))
        sees = allowed.float() @ of_key[:, :, keys].float() > 0
        asks = of_query[:, :, rows] & allowed.any(-1, keepdim=True)
        return (sees | asks).transpose(1, 2)


def _harmless(q: Tensor, k: Tensor, v: Tensor, scale: float) -> bool:
    """Whether all is finite, no score is so large that its rounding matters, and no sum can leave the dtype's range."""
    if not (q.numel() and k.numel() and v.numel()):
        return True
    of_q, of_k, of_v = (max(-low.item(), high.item()) for low, high in (x.aminmax() for x in (q, k, v)))
    scores = of_q * of_k * q.shape[3] * max(1.0, abs(scale))
    return scores < _HUGE_SCORES and of_v * k.shape[1] < torch.finfo(q.dtype).max / 8  # False of NaN


def _set_aside(q, k, v, keep):
    """q, k, v with 0 for what is not finite or a masked key; and, if anything else was not finite, which queries,
    (B, T_q, H, 1), and which keys, (B, T, H, d_v). Queries may be tokens of another sequence, so no mask is theirs."""
    if keep is not None:
        hidden = ~keep[..., None, None]
        k, v = k.masked_fill(hidden, 0.0), v.masked_fill(hidden, 0.0)
    good_q, good_k, good_v = q.isfinite(), k.isfinite(), v.isfinite()
    bad = ~good_q.all(-1, keepdim=True), ~(good_v & good_k.all(-1, keepdim=True))
    q, k, v = (x.where(good, 0.0) for x, good in ((q, good_q), (k, good_k), (v, good_v)))
    return q, k, v, bad if bool(bad[0].any() | bad[1].any()) else None


class _Read(torch.autograd.Function):
    """Returns the `values` that it saves, too, so that second derivatives account for their dependence on v."""

    @staticmethod
    def forward(ctx, q, k, v, beta, bias, *how):
        ctx.set_materialize_grads(False)
        out, free_energy, lse, values, shift, span = _forward(q, k, v, beta, bias, *how)
        keep, first, end, *ctx.how = how
        v_or_none = None if first is None else v  # else `values` holds it
        ctx.save_for_backward(q, k, v_or_none, beta, bias, keep, first, end, out, lse, values, shift, span)
        ctx.shape = v.shape
        return out[..., : v.shape[3]], free_energy, values

    @staticmethod
    def backward(ctx, grad_mean, grad_free_energy, grad_values):
        of_beta, of_bias = ctx.needs_input_grad[3:5]
        q, k, v, *rest = ctx.saved_tensors
        v = rest[-3][:, :, :: q.shape[2] // k.shape[2], : ctx.shape[3]] if v is None else v
        if torch.is_grad_enabled():
            return *_again(q, k, v, grad_mean, grad_free_energy, grad_values, *rest[:5], *ctx.how), *[None] * 6
        shape = (*q.shape[:3], ctx.shape[3])
        grad_mean = rest[5].new_zeros(shape) if grad_mean is None else grad_mean
        if grad_free_energy is None:
            grad_free_energy = rest[5].new_zeros(shape if rest[0] is not None else 0)
        dq, dk, dv, dbeta, dbias = _backward(grad_mean, grad_free_energy, q, k, v, *rest, *ctx.how, of_bias)
        if _kept(grad_values):
            dv = dv + _of_kept(grad_values, dv)
        return dq, dk, dv, dbeta if of_beta else None, dbias if of_bias else None, *[None] * 6


def _again(q, k, v, grad_mean, grad_free_energy, grad_values, beta, bias, keep, first, end, causal, scale, _):
    """Gradients that can be differentiated again."""
    read = lambda *inputs: differentiable_read(*inputs, keep, first, end, causal, scale)  # noqa: E731
    grads = again_differentiable(read, (q, k, v, beta, bias), (grad_mean, grad_free_energy))
    if _kept(grad_values):
        of_v = _of_kept(grad_values, k.new_empty(*k.shape[:3], v.shape[3]))
        grads[2] = of_v if grads[2] is None else grads[2] + of_v
    return grads


def _kept(grad_values: Tensor | None) -> bool:
    """Whether `values` were saved, and have a gradient: reads in several blocks save none."""
    return grad_values is not None and grad_values.ndim == 4


def _of_kept(grad_values: Tensor, dv: Tensor) -> Tensor:
    """The gradient of v, in the shape of dv, from that of the saved [v | e | zeros] per query head."""
    return grad_values[..., : dv.shape[3]].unflatten(2, (dv.shape[2], -1)).sum(3).to(dv.dtype)


_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? beta, Tensor? bias, Tensor? keep, Tensor? first, Tensor? end"
_HOW = "bool causal, float scale, bool flash"


@torch.library.custom_op(
    "fem::softmax_read",
    mutates_args=(),
    schema=f"({_INPUTS}, {_HOW}) -> "
    "(Tensor out, Tensor free_energy, Tensor lse, Tensor values, Tensor shift, Tensor span)",
)
def _forward(q, k, v, beta, bias, keep, first, end, causal, scale, flash):
    """[mean | R | zeros], F, and what the backward needs besides; with beta=None the mean alone."""
    with torch.autocast(q.device.type, enabled=False):
        call = _Call(q, k, v, beta, bias, keep, first, end, causal, scale, flash)
        if first is None and not call.careful:
            (block,) = call.blocks()
            if beta is None:
                values = block.scores.padded(block.v)
                out, lse = block.scores.attend(values)
                return out, out.new_empty(0), lse, values, out.new_empty(0), out.new_empty(0)
            read = FreeEnergyRead.of(block.scores, block.v, call.beta)
            out, free_energy, lse, recomputed = read.forward()
            fallbacks.count(free_energy.numel(), recomputed)
            return out, free_energy, lse, read.values, read.shift, read.span
        empty = _empty(q, k, v, beta, first, flash)
        out, free_energy, lse, values, shift, span = (x.zero_() for x in empty) if call.careful else empty
        channels = v.shape[3]
        if first is None:
            values[..., :channels] = call._per_head(v, 2)
        for block in call.blocks():
            if beta is None:
                o, weight = block.scores.attend(block.scores.padded(block.v))
            else:
                o, free, weight, recomputed = FreeEnergyRead.of(block.scores, block.v, call.beta).forward()
                fallbacks.count(free.numel(), recomputed)
                free_energy[:, block.rows] = free
            out[:, block.rows, :, : o.shape[3]], lse[:, block.rows] = o, weight
            if block.poisoned is not None:
                out[:, block.rows, :, :channels].masked_fill_(block.poisoned, torch.nan)
                if beta is not None:
                    free_energy[:, block.rows].masked_fill_(block.poisoned, torch.nan)
        return out, free_energy, lse, values, shift, span


@_forward.register_fake
def _(q, k, v, beta, bias, keep, first, end, causal, scale, flash):
    return _empty(q, k, v, beta, first, flash)


def _empty(q, k, v, beta, first, flash):
    """Tensors of the shapes that `_forward` returns."""
    (batch, queries, heads, width), (time, channels) = q.shape, (k.shape[1], v.shape[3])
    columns = channels if beta is None else 2 * channels
    width = max(columns, width) if flash else columns
    empty = lambda *shape: q.new_empty(shape, dtype=compute_dtype(q))  # noqa: E731
    out, lse = empty(batch, queries, heads, width), empty(batch, queries, heads)
    values = empty(batch, time, heads, width) if first is None else empty(0)
    free_energy = empty(0) if beta is None else empty(batch, queries, heads, channels)
    bounds = [empty(0) if beta is None or first is not None else empty(batch, 1, heads, channels) for _ in range(2)]
    return out, free_energy, lse, values, *bounds


@torch.library.custom_op(
    "fem::softmax_read_backward",
    mutates_args=(),
    schema=f"(Tensor grad_mean, Tensor grad_free_energy, {_INPUTS}, Tensor out, Tensor lse, Tensor values, "
    f"Tensor shift, Tensor span, {_HOW}, bool of_bias) -> "
    "(Tensor dq, Tensor dk, Tensor dv, Tensor dbeta, Tensor dbias)",
)
def _backward(
    grad_mean, grad_free_energy, q, k, v, beta, bias, keep, first, end, out, lse, values, shift, span,
    causal, scale, flash, of_bias,
):  # fmt: skip
    with torch.autocast(q.device.type, enabled=False):
        call = _Call(q, k, v, beta, bias, keep, first, end, causal, scale, flash)
        whole = first is None and not call.careful
        total = None
        for block in call.blocks():
            grads = [x[:, block.rows] if x.numel() else x for x in (grad_mean, grad_free_energy)]
            if block.poisoned is not None:
                grads = [x.masked_fill(block.poisoned & (x != 0), torch.nan) if x.numel() else x for x in grads]
            known = None if call.careful else (out[:, block.rows], lse[:, block.rows])
            stored = (values, shift, span) if whole else None
            part = _of_block(block, call.beta, *grads, known, stored, of_bias)
            if whole:
                total = part
                dbias = part.scores.sum_to_size(bias.shape) if of_bias else None
                break
            if total is None:
                total = Gradients(
                    *(None if x is None else torch.zeros_like(x) for x in (call.q, call.k, call.v, call.beta)), None
                )
                dbias = torch.zeros_like(call.bias) if of_bias else None
            total.q[:, block.rows] = part.q
            total.k[:, block.keys] += part.k
            total.v[:, block.keys] += part.v
            if beta is not None:
                total.beta.add_(part.beta)
            if of_bias:
                here = call.bias_of(block.rows, block.keys, dbias)
                here += part.scores.sum_to_size(here.shape)
        dq, dk, dv, dbeta, _ = total
        if q.shape[2] > k.shape[2]:
            dk, dv = (x.unflatten(2, (k.shape[2], -1)).sum(3) for x in (dk, dv))
        dbeta = out.new_empty(0) if beta is None else dbeta[0, 0].unflatten(0, (len(beta), -1)).sum(1).to(beta.dtype)
        dbias = dbias.to(bias.dtype) if of_bias else out.new_empty(0)
        return *(x.to(q.dtype).contiguous() for x in (dq, dk, dv)), dbeta, dbias


@_backward.register_fake
def _(
    grad_mean, grad_free_energy, q, k, v, beta, bias, keep, first, end, out, lse, values, shift, span,
    causal, scale, flash, of_bias,
):  # fmt: skip
    whole = lambda x: x.new_empty(x.shape)  # noqa: E731
    dv = k.new_empty(*k.shape[:3], grad_mean.shape[3])
    dbeta = out.new_empty(0) if beta is None else whole(beta)
    return whole(q), whole(k), dv, dbeta, whole(bias) if of_bias else out.new_empty(0)


register_flop_formula(torch.ops.fem.softmax_read)(flops.softmax)
register_flop_formula(torch.ops.fem.softmax_read_backward)(flops.softmax_backward)


def _of_block(block: _Block, beta, grad_mean, grad_free_energy, known, stored, of_bias: bool) -> Gradients:
    """known: [mean | R] and lse of the block, and stored: its values and their bounds, where these can be used."""
    scores = block.scores
    if beta is None:
        values = scores.padded(block.v)
        known = scores.attend(values) if known is None else known
        grad = scores.padded(grad_mean.to(values.dtype))  # the scores may have asked for float64
        dq, dk, dv, ds = scores.attend_backward(grad, values, *known, of_bias)
        return Gradients(dq, dk, dv[..., : grad_mean.shape[3]], None, ds)
    if stored is None:
        read = FreeEnergyRead.of(scores, block.v, beta)
    else:
        values, shift, span = stored
        read = FreeEnergyRead(scores, values, beta, shift, span)
    delicate = scores.q.shape[1] * scores.k.shape[1] <= _FEW_SCORES
    delicate = delicate or (beta.dtype == torch.float32 and bool(beta.amin() < SMALLEST_BETA))
    if delicate or (known is not None and bool(known[1].abs().amax() > _LARGE_SCORES)):
        read, known = read.in_float64(), None
    if known is None:
        out, _, lse, _ = read.forward()
        known = out, lse
    return read.backward(grad_mean, grad_free_energy, *known, of_bias)
