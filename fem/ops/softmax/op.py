"""The softmax read as one differentiable op, by blocks of queries against the keys that they can see.

Where causality and masked keys are all that restricts the pairs, one call reads everything. What is not finite may
reach any row of its own sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Bool
from torch import Tensor

from fem.ops.common.operator import operator
from fem.ops.common.precision import compute_dtype, without_autocast
from fem.ops.common.read import LOG_ZERO, Read
from fem.ops.common.transforms import again_differentiable, transformed
from fem.ops.softmax.plain import Gradients, PairRead
from fem.ops.softmax.recompute import recompute
from fem.ops.softmax.scores import Scores
from fem.ops.softmax.support import PAIRS, Intervals, Pairs

ROWS = 256  # queries of a block: few enough that a window of as many keys is most of what they see


def pair_read(q: Tensor, k: Tensor, v: Tensor, f: Tensor, beta: Tensor, pairs: Pairs, flash: bool) -> Read:
    """The mean of v and the free energy of f, in float32 at least; shapes as in `read.softmax_read`.

    flash: by torch's flash attention on a CPU instead of materialised scores.
    """
    if transformed(q, k, v, f, beta, pairs.bias):
        dtype = compute_dtype(q)
        return Read(*(x.to(dtype) for x in _differentiable_read(q, k, v, f, beta, pairs)))
    mean, free_energy, doubtful = _Read.apply(q, k, v, None if f is v else f, beta, *pairs, flash)
    return Read(mean, recompute(free_energy, doubtful, q, k, f, beta, pairs))


class _Block(NamedTuple):
    """Some queries, the keys that any of them sees, and the read of one over the other."""

    rows: slice
    keys: slice
    read: PairRead


class _Call:
    """The tensors of a read, with as many key heads as query heads, and its blocks."""

    def __init__(self, q, k, v, f, beta, *pairs):
        *pairs, self.flash = pairs
        self.heads, dtype = q.shape[2], compute_dtype(q)
        self.q, self.k, self.v = q.to(dtype), *(self._per_head(x, 2).to(dtype) for x in (k, v))
        self.f = self.v if f is None else self._per_head(f, 2).to(dtype)
        self.beta = self._per_head(beta, 0).to(dtype)[None, None]
        bias, self.keep, first, end, self.causal, self.scale = pairs
        self.bias = None if bias is None else bias.to(dtype)
        self.seen = None if first is None else Intervals(first, end)

    def _per_head(self, x: Tensor, dim: int) -> Tensor:
        groups = self.heads // x.shape[dim]
        return x.repeat_interleave(groups, dim) if groups > 1 else x

    def blocks(self) -> Iterator[_Block]:
        queries, keys = self.q.shape[1], self.k.shape[1]
        if self.seen is None:
            everything = slice(0, queries), slice(0, keys)
            mask = self._mask(None if self.keep is None else self.keep[:, None, None], *everything)
            scores = Scores(self.q, self.k, mask, self.causal, self.scale, self.flash)
            yield _Block(*everything, PairRead(scores, self.v, self.f, self.beta))
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
            yield _Block(rows, seen, PairRead(scores, self.v[:, seen], self.f[:, seen], self.beta))

    def bias_of(self, rows: slice, keys: slice, of: Tensor) -> Tensor:
        """The part of the bias, or of something of its shape, that belongs to a block."""
        return of[:, :, rows if of.shape[2] > 1 else slice(None), keys if of.shape[3] > 1 else slice(None)]

    def _mask(self, allowed: Bool[Tensor, "#b 1 #tq t"] | None, rows: slice, keys: slice) -> Tensor | None:
        """What is added to the scores: the bias, -inf where a key is not allowed; None: nothing."""
        bias = None if self.bias is None else self.bias_of(rows, keys, self.bias)
        if allowed is not None:
            return torch.where(allowed, self.q.new_zeros(()) if bias is None else bias, -torch.inf)
        return None if bias is None else bias.expand(*bias.shape[:3], keys.stop - keys.start)


class _Read(torch.autograd.Function):
    """f: None where it is v, as dynamo takes no tensor twice; their gradients are then added in one pass."""

    @staticmethod
    def forward(ctx, *inputs):
        ctx.set_materialize_grads(False)
        out, free_energy, lse, doubtful = _forward(*inputs)
        *tensors, ctx.causal, ctx.scale, ctx.flash = inputs
        ctx.save_for_backward(*tensors, out, lse)
        mean = out[..., : inputs[2].shape[3]]
        ctx.mark_non_differentiable(doubtful)
        return mean, free_energy, doubtful

    @staticmethod
    def backward(ctx, grad_mean, grad_free, _):
        *tensors, out, lse = ctx.saved_tensors
        inputs, rules = tensors[:6], (*tensors[6:], ctx.causal, ctx.scale)
        if torch.is_grad_enabled():

            def read(q, k, v, f, beta, bias):
                return _differentiable_read(q, k, v, v if f is None else f, beta, Pairs(bias, *rules))

            return *again_differentiable(read, inputs, (grad_mean, grad_free)), *[None] * 6
        zeros = lambda width: out.new_zeros(*out.shape[:3], width)  # noqa: E731
        widths = inputs[2].shape[3], inputs[4].shape[1]
        grads = [zeros(width) if grad is None else grad for grad, width in zip((grad_mean, grad_free), widths)]
        of_bias = ctx.needs_input_grad[5]
        dq, dk, dvalues, dbeta, dbias = _backward(*grads, *inputs, *rules, ctx.flash, out, lse, of_bias)
        dv, df, _ = dvalues.split([*widths, dvalues.shape[3] - sum(widths)], -1)
        dv, df = (dv + df, None) if inputs[3] is None else (dv, df)
        return dq, dk, dv, df, dbeta, dbias if of_bias else None, *[None] * 6


_INPUTS = f"Tensor q, Tensor k, Tensor v, Tensor? f, Tensor beta, {PAIRS}, bool flash"


@operator(f"softmax_read({_INPUTS}) -> (Tensor out, Tensor free_energy, Tensor lse, Tensor doubtful)")
def _forward(q, k, v, f, beta, *pairs):
    """[mean | R | zeros], F, lse, and which F are not proven."""
    with without_autocast(q.device):
        parts = [block.read.forward() for block in _Call(q, k, v, f, beta, *pairs).blocks()]
        return parts[0] if len(parts) == 1 else tuple(torch.cat(x, 1) for x in zip(*parts))


@_forward.register_fake
def _empty(q, k, v, f, beta, bias, keep, first, end, causal, scale, flash):
    """Tensors of the shapes that `_forward` returns."""
    channels = beta.shape[1]
    columns = max(v.shape[3] + channels, q.shape[3])
    out, free_energy = (q.new_empty(*q.shape[:3], n, dtype=compute_dtype(q)) for n in (columns, channels))
    return out, free_energy, out.new_empty(q.shape[:3]), out.new_empty(free_energy.shape, dtype=torch.bool)


@operator(
    f"softmax_read_backward(Tensor grad_mean, Tensor grad_free, {_INPUTS}, Tensor out, Tensor lse, bool of_bias) "
    "-> (Tensor dq, Tensor dk, Tensor dvalues, Tensor dbeta, Tensor dbias)",
)
def _backward(grad_mean, grad_free, q, k, v, f, beta, bias, keep, first, end, causal, scale, flash, out, lse, of_bias):
    with without_autocast(q.device):
        call = _Call(q, k, v, f, beta, bias, keep, first, end, causal, scale, flash)
        total, dbias = None, torch.zeros_like(call.bias) if of_bias else None
        for block in call.blocks():
            here = [x[:, block.rows] for x in (grad_mean, grad_free, out, lse)]
            part = block.read.backward(*here, of_bias)
            if of_bias:
                of_block = call.bias_of(block.rows, block.keys, dbias)
                of_block += part.scores.sum_to_size(of_block.shape)
            if call.seen is None:
                total = part
                continue
            if total is None:
                values = call.v.new_zeros(*call.v.shape[:3], part.values.shape[3])
                total = Gradients(*map(torch.zeros_like, (call.q, call.k)), values, torch.zeros_like(call.beta), None)
            total.q[:, block.rows] = part.q
            for sums, more in zip(total[1:3], part[1:3]):
                sums[:, block.keys] += more
            total.beta.add_(part.beta)
        shared = k.shape[2], q.shape[2] // k.shape[2]
        of_keys = lambda x: x.unflatten(2, shared).sum(3) if shared[1] > 1 else x  # noqa: E731
        dbeta = total.beta[0, 0].unflatten(0, shared).sum(1).to(beta.dtype)
        gradients = total.q, of_keys(total.k), of_keys(total.values)
        dbias = dbias.to(bias.dtype) if of_bias else out.new_empty(0)
        return *(x.to(q.dtype).contiguous() for x in gradients), dbeta, dbias


@_backward.register_fake
def _(grad_mean, grad_free, q, k, v, f, beta, bias, keep, first, end, causal, scale, flash, out, lse, of_bias):
    like = lambda x: x.new_empty(x.shape)  # noqa: E731
    dvalues = v.new_empty(*v.shape[:3], out.shape[3])
    return like(q), like(k), dvalues, like(beta), like(bias) if of_bias else q.new_empty(0)


def _differentiable_read(q: Tensor, k: Tensor, v: Tensor, f: Tensor, beta: Tensor, pairs: Pairs) -> Read:
    """The mean of v and the free energy of f in float64, in plain steps that PyTorch can transform in any way.

    Time and memory grow with T_q T d_f.

    m_j = sum_i p_i f_ij        F_j = m_j + (1 / beta_j) log sum_i p_i exp(beta_j (f_ij - m_j))
    """
    heads = q.shape[2]
    per_head = lambda x, dim: x.double().repeat_interleave(heads // x.shape[dim], dim)  # noqa: E731
    scores = torch.einsum("bthc,bihc->bhti", q.double(), per_head(k, 2)) * pairs.scale
    if pairs.bias is not None:
        scores = scores + pairs.bias.double()
    seen = pairs.allowed(q.shape[1], k.shape[1], q.device)
    empty = ~seen.any(-1, keepdim=True)
    log_p = torch.where(seen, scores, -torch.inf).masked_fill(empty, 0.0).log_softmax(-1).masked_fill(~seen, LOG_ZERO)
    p = log_p.exp()
    nobody = ~seen.any(-2)[..., None]  # whose values are multiplied by nothing but 0
    v, f = (per_head(x, 2).transpose(1, 2).masked_fill(nobody, 0.0) for x in (v, f))
    middle, beta = p @ f, per_head(beta, 0)[:, None]
    away = beta[:, :, None] * (f[:, :, None] - middle[:, :, :, None])
    free_energy = middle + (log_p[..., None] + away).logsumexp(-2) / beta
    return Read((p @ v).transpose(1, 2), free_energy.masked_fill(empty, 0.0).transpose(1, 2))
