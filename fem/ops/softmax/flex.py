"""The softmax read on a GPU without kernels of our own: torch's fastest attention over [v | e], and a logarithm."""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from fem.ops.common.fallback_count import suspects
from fem.ops.common.precision import wide
from fem.ops.common.read import Read
from fem.ops.softmax import entries as softmax_entries
from fem.ops.softmax.channels import PROVEN
from fem.ops.softmax.support import Intervals

_TILE = 128


def softmax_read(
    q: Float[Tensor, "b tq h dk"],
    k: Float[Tensor, "b t hkv dk"],
    v: Float[Tensor, "b t hkv dv"],
    beta: Float[Tensor, "hkv dv"] | None,
    seen: Intervals,
    bias: Float[Tensor, "#b #h #tq #t"] | None,
    scale: float,
    causal: bool | None,
) -> Read:
    """Mean and free energy of the values under a softmax prior, as a chain of torch's own operations.

        w = log2(e) beta v      c = ceil(max_i w_i)      e = 2^(w - c)      [mean | R] = attention(q, k, [v | e])
        F = (log2(R) + c) / (log2(e) beta)                                              (Eq. 4, Appendix H.1)

    The shift is an integer, so that a later token rescales e without rounding it. R >= e^-60 proves an entry; others
    are computed again from the definition in float64. Attention is torch's scaled dot product where causal is a bool
    and says all of what a row sees, FlexAttention over the blocks of `seen` where it is None. bfloat16 is read as it
    is, float16 in float32. A row that sees no key reads 0.
    """
    dtype = torch.bfloat16 if q.dtype == torch.bfloat16 else wide(q).dtype
    first, end, kept, order = seen
    if order is not None:
        k, v = (x.take_along_dim(order[:, :, None, None], 1) for x in (k, v))
        if bias is not None and bias.shape[3] > 1:
            bias = bias.take_along_dim(order[:, None, None], 3)
    with torch.autocast(q.device.type, enabled=False):
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        attend = functools.partial(_attend, q, k, seen=seen, bias=bias, scale=scale, causal=causal)
        if beta is None:
            return Read(attend(v), None)
        return _read(attend, q, k, v, beta, kept, bias, first, end, scale)


def _read(attend, q, k, v, beta, kept, bias, first, end, scale) -> Read:
    hidden = None if kept is None else (torch.arange(k.shape[1], device=k.device) >= kept[:, None])[..., None, None]
    v = v if hidden is None else v.masked_fill(hidden, 0.0)
    w, rate = wide(v), wide(beta) * math.log2(math.e)
    at = rate.detach()
    shift, near = _shift(at * w.detach(), hidden)
    z = at * w - shift + (rate - at) * (w.detach() - shift / at)  # no digit of v itself in beta's gradient
    z = z if hidden is None else z.masked_fill(hidden, 0.0)
    e = torch.where(near, torch.expm1(torch.where(near, z, 0) * math.log(2)), torch.exp2(z))
    mean, total = attend(torch.cat([v, e.to(v.dtype)], -1)).split(v.shape[-1], -1)

    total = wide(total)
    shift, near, rate, at = (_per_query_head(x, q.shape[2]) for x in (shift, near, rate, at))
    sees = (first < end)[..., None, None]
    doubtful = (total < PROVEN) & ~near & sees
    total = torch.where(doubtful | ~sees, 1.0, total)
    bits = torch.where(near, torch.log1p(torch.where(near, total, 0)), torch.log(torch.where(near, 1, total)))
    bits = bits * math.log2(math.e)
    free_energy = (bits + shift) / at + bits.detach() * (1 / rate - 1 / at)
    if torch.compiler.is_compiling() or bool(doubtful.any()):
        exact = _settle(doubtful, q, k, v, beta, bias, first, end, scale)
        free_energy = torch.where(doubtful, exact, free_energy)
    else:
        suspects.count(doubtful.numel(), 0)
    return Read(torch.where(sees, mean, 0.0), torch.where(sees, free_energy, 0.0))


def _shift(w: Tensor, hidden: Tensor | None) -> tuple[Float[Tensor, "b 1 h d"], Bool[Tensor, "b 1 h d"]]:
    """The integer above every w of a channel, or 0 where all |w| < 1; and where that is."""
    high, low = (w if hidden is None else w.masked_fill(hidden, none) for none in (-torch.inf, torch.inf))
    high, low = high.amax(1, keepdim=True), low.amin(1, keepdim=True)
    high, low = (x.where(x.isfinite(), 0.0) for x in (high, low))
    near = torch.maximum(high, -low) < 1
    return torch.where(near, 0.0, high.ceil()), near


def _per_query_head(x: Tensor, heads: int) -> Tensor:
    return x.repeat_interleave(heads // x.shape[-2], -2)


def _attend(q, k, values, *, seen: Intervals, bias: Tensor | None, scale: float, causal: bool | None):
    q, k, values = (x.transpose(1, 2) for x in (q, k, values))
    how = {"scale": scale, "enable_gqa": q.shape[1] != k.shape[1]}
    if causal is not None:
        return F.scaled_dot_product_attention(q, k, values, is_causal=causal, **how).transpose(1, 2)
    score = None if bias is None else _biased(bias)
    return _flex(q.device.type)(q, k, values, score, block_mask(seen, k.shape[2]), **how).transpose(1, 2)


@functools.cache
def _flex(device: str):
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False) if device == "cuda" else flex_attention


def _biased(bias: Float[Tensor, "#b #h #tq #t"]):
    """The score_mod that adds a bias, which is broadcast where it has but one entry."""
    whole = [int(size > 1) for size in bias.shape]
    return lambda score, *place: score + bias[tuple(index * wide for index, wide in zip(place, whole))]


def block_mask(seen: Intervals, keys: int):
    """The blocks of keys that each block of queries sees in part and in whole, from its interval: no T x T mask."""
    from torch.nn.attention.flex_attention import BlockMask

    first, end = seen.first, seen.end
    rows = first.shape[1]
    blocks = lambda x: F.pad(x, (0, -rows % _TILE), mode="replicate").unflatten(1, (-1, _TILE)).float()  # noqa: E731
    low, high = blocks(first), blocks(end)
    top = torch.arange(0, keys, _TILE, device=first.device)
    bottom = top + _TILE
    some = (top < high.amax(2)[..., None]) & (bottom > low.amin(2)[..., None])
    whole = (top >= low.amax(2)[..., None]) & (bottom <= high.amin(2)[..., None])  # a ragged last block never is
    listed = []
    for chosen in (some & ~whole, whole):
        order = chosen.int().argsort(dim=-1, descending=True, stable=True)
        listed += [chosen.sum(-1, dtype=torch.int32)[:, None], order.to(torch.int32)[:, None]]

    many = int(len(first) > 1)
    sees = lambda b, h, row, key: (first[b * many, row] <= key) & (key < end[b * many, row])  # noqa: E731
    return BlockMask.from_kv_blocks(*listed, BLOCK_SIZE=_TILE, mask_mod=sees, seq_lengths=(rows, keys))


# The entries that one attention call does not prove, from the definition in float64.


@torch.library.custom_op(
    "fem::softmax_settle",
    mutates_args=(),
    schema="(Tensor doubtful, Tensor q, Tensor k, Tensor v, Tensor beta, Tensor? bias, Tensor first, Tensor end, "
    "float scale) -> Tensor",
)
def _settle(doubtful, q, k, v, beta, bias, first, end, scale):
    """The free energy where it is doubtful, 0 elsewhere."""
    found = torch.zeros(doubtful.shape, dtype=wide(q).dtype, device=q.device)
    entries = doubtful.transpose(1, 2).nonzero()
    suspects.count(doubtful.numel(), len(entries))
    if len(entries):
        b, head, row, channel = entries.unbind(1)
        scores, *definition = softmax_entries.definition(q, k, v, beta, bias, first, end, scale)
        found[b, row, head, channel] = softmax_entries.free_energies(scores, *definition, entries).to(found.dtype)
    return found


@_settle.register_fake
def _(doubtful, q, k, v, beta, bias, first, end, scale):
    return torch.empty(doubtful.shape, dtype=wide(q).dtype, device=q.device)


@torch.library.custom_op(
    "fem::softmax_settle_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor doubtful, Tensor q, Tensor k, Tensor v, Tensor beta, Tensor? bias, Tensor first, "
    "Tensor end, float scale, bool of_bias) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _settle_backward(grad, doubtful, q, k, v, beta, bias, first, end, scale, of_bias):
    entries = doubtful.transpose(1, 2).nonzero()
    b, head, row, channel = entries.unbind(1)
    scores, *definition = softmax_entries.definition(q, k, v, beta, bias, first, end, scale)
    more = [torch.zeros_like(x) for x in (scores.q, scores.k, *definition)]
    ds = grad.new_zeros(len(q), q.shape[2], q.shape[1], k.shape[1]) if of_bias else None
    if len(entries):
        softmax_entries.add_gradients(scores, *definition, entries, grad[b, row, head, channel], *more, ds)
    dq, dk, dv, dbeta = more
    of_group = lambda x, dim: x.unflatten(dim, (k.shape[2], -1)).sum(dim + 1)  # noqa: E731
    dbias = ds.sum_to_size(bias.shape).to(bias.dtype) if of_bias else grad.new_empty(0)
    dk, dv, dbeta = of_group(dk, 2).to(k.dtype), of_group(dv, 2).to(v.dtype), of_group(dbeta[0, 0], 0).to(beta.dtype)
    return dq.to(q.dtype), dk, dv, dbeta, dbias


@_settle_backward.register_fake
def _(grad, doubtful, q, k, v, beta, bias, first, end, scale, of_bias):
    whole = lambda x: x.new_empty(x.shape)  # noqa: E731
    return whole(q), whole(k), whole(v), whole(beta), whole(bias) if of_bias else grad.new_empty(0)


def _save(ctx, inputs, output):
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx, grad):
    of_bias = ctx.needs_input_grad[5]
    *gradients, dbias = _settle_backward(grad, *ctx.saved_tensors, ctx.scale, of_bias)
    return None, *gradients, dbias if of_bias else None, None, None, None


_settle.register_autograd(_differentiate, setup_context=_save)
