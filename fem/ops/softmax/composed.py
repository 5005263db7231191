"""The softmax read on a GPU: torch's best attention over [v | e], between one fused prologue and one fused epilogue."""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fem.ops.common.precision import LEAST_PROVEN, upcast
from fem.ops.common.read import Read
from fem.ops.softmax.recompute import recompute
from fem.ops.softmax.support import Intervals

_TILE = 128
_PROVEN_SPAN = 58.0  # nats: the shift takes up to log 2 more, the rounding of p and e the rest to 60
_NOT_FINITE = 2.0**100  # in place of an e that is not finite: only rows that see it have an R this large
_FUSED = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]


def composed_read(
    q: Float[Tensor, "b tq h dk"],
    k: Float[Tensor, "b t hkv dk"],
    v: Float[Tensor, "b t hkv dv"],
    beta: Float[Tensor, "hkv dv"] | None,
    bias: Float[Tensor, "#b #h #tq #t"] | None,
    keep: Bool[Tensor, "b t"] | None,
    seen: Intervals | None,
    causal: bool,
    scale: float,
    span: float = math.inf,
) -> Read:
    """Mean and free energy of the values under a softmax prior, as a chain of torch's own operations.

        w = log2(e) beta v      c = ceil(max_i w_i)      e = 2^(w - c)      [mean | R] = attention(q, k, [v | e])
        F = (log2(R) + c) / (log2(e) beta)                                              (Eq. 4, Appendix H.1)

    The shift is an integer, so that a later token rescales e without rounding it. R >= e^-60 proves an entry; others
    are computed again from the definition in float64, on a GPU by our kernels, so that the host waits for no flag.
    span: what beta (max v - min v) is at most, in nats; up to 58 it proves all entries. seen: what a row sees besides
    `keep`, which FlexAttention reads by blocks; None: all, or i <= t if causal, which scaled dot product attention
    knows. bfloat16 is read as it is, float16 in float32. A row that sees no key reads 0.
    """
    dtype = torch.bfloat16 if q.dtype == torch.bfloat16 else upcast(q).dtype
    kept = None
    if keep is not None:
        seen, kept, order = seen.of_kept(keep)
        k, v = (x.take_along_dim(order[:, :, None, None], 1) for x in (k, v))
        if bias is not None and bias.shape[3] > 1:
            bias = bias.take_along_dim(order[:, None, None], 3)
    with torch.autocast(q.device.type, enabled=False):
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        sees = None if seen is None else (seen.first < seen.end)[..., None, None]
        if beta is None:
            mean = _attend(q, k, v, bias, seen, causal, scale)
            return Read(mean if sees is None else torch.where(sees, mean, 0.0), None)
        fused = _fused if q.is_cuda and not torch.compiler.is_compiling() else lambda function: function
        packed, shift, near = fused(_prologue)(v, beta, kept)
        out = _attend(q, k, packed, bias, seen, causal, scale)
        mean, free_energy, doubtful = fused(_epilogue)(out, beta, shift, near, sees)
        if span > _PROVEN_SPAN:
            free_energy = recompute(free_energy, doubtful, q, k, v, beta, bias, seen, causal, scale)
        return Read(mean, free_energy)


def _prologue(
    v: Float[Tensor, "b t h d"], beta: Float[Tensor, "h d"], kept: Int[Tensor, " b"] | None
) -> tuple[Float[Tensor, "b t h w"], Float[Tensor, "b 1 h d"], Bool[Tensor, "b 1 h d"]]:
    """[v | e], the shift, and where a channel is so near 0 that e is 2^w - 1."""
    w, rate = upcast(v), upcast(beta) * math.log2(math.e)
    at = rate.detach()
    level = at * w.detach()
    visible = finite = level.isfinite()
    bad = ~finite
    if kept is not None:
        exists = (torch.arange(v.shape[1], device=v.device) < kept[:, None])[..., None, None]
        visible, bad = finite & exists, bad & exists
    high = level.where(visible, -torch.inf).amax(1, keepdim=True)
    low = level.where(visible, torch.inf).amin(1, keepdim=True)
    high, low = high.where(high >= low, 0.0), low.where(high >= low, 0.0)
    near = torch.maximum(high, -low) < 1
    shift = torch.where(near, 0.0, high.ceil())
    w = w.where(visible, 0.0)
    z = at * w - shift + (rate - at) * (w.detach() - shift / at)  # no digit of v itself in beta's gradient
    z = z.where(visible, 0.0)
    e = torch.where(near, torch.expm1(z.where(near, 0.0) * math.log(2)), torch.exp2(z))
    e = torch.where(bad, _NOT_FINITE, e)
    return torch.cat([w.to(v.dtype), e.to(v.dtype)], -1), shift, near


def _epilogue(
    out: Float[Tensor, "b tq h w"], beta: Tensor, shift: Tensor, near: Tensor, sees: Bool[Tensor, "#b tq 1 1"] | None
) -> tuple[Float[Tensor, "b tq h d"], Float[Tensor, "b tq h d"], Bool[Tensor, "b tq h d"]]:
    """Mean, free energy, and where it is not proven."""
    mean, total = out.chunk(2, -1)
    total = upcast(total)
    rate = upcast(beta) * math.log2(math.e)
    shift, near, rate = (x.repeat_interleave(out.shape[2] // x.shape[-2], -2) for x in (shift, near, rate))
    at = rate.detach()
    doubtful = (total < LEAST_PROVEN[torch.float32]) & ~near
    if sees is not None:
        doubtful = doubtful & sees
    total = torch.where(doubtful, 1.0, total)
    if sees is not None:
        total = torch.where(sees, total, 1.0)
    bits = torch.where(near, torch.log1p(torch.where(near, total, 0)), torch.log(torch.where(near, 1, total)))
    bits = bits * math.log2(math.e)
    free_energy = (bits + shift) / at + bits.detach() * (1 / rate - 1 / at)
    bad = total > math.sqrt(_NOT_FINITE)
    mean, free_energy = (torch.where(bad, torch.nan, x) for x in (mean, free_energy))
    if sees is not None:
        mean, free_energy = (torch.where(sees, x, 0.0) for x in (mean, free_energy))
    return mean, free_energy, doubtful


def _fused(function: Callable) -> Callable:
    """The function compiled, for eager calls on a GPU; as it is where the compiler fails."""
    return function if function in _UNFUSED else functools.partial(_try_fused, function)


_UNFUSED: set[Callable] = set()


def _try_fused(function: Callable, *arguments):
    for x in arguments:  # any number of rows and tokens; heads and widths stay sizes that loops are fused over
        for dim in range(0 if x is None or x.ndim == 2 else min(x.ndim, 2)):
            torch._dynamo.maybe_mark_dynamic(x, dim)
    try:
        return _compiled(function)(*arguments)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of whatever kind: without a compiler the functions run as they are
        _UNFUSED.add(function)
        warnings.warn(f"torch.compile fails here, so reads take more launches: {error}", stacklevel=2)
        return function(*arguments)


@functools.cache
def _compiled(function: Callable) -> Callable:
    return torch.compile(function)


def _attend(q, k, values, bias, seen: Intervals | None, causal: bool, scale: float) -> Float[Tensor, "b tq h w"]:
    """p @ values by torch's attention: scaled dot product without a restriction by pairs, FlexAttention with one.

    Never by the form that materialises T x T scores on a GPU: widths are equal multiples of 16, which every fused
    kernel takes, and key heads are repeated in float32, whose fused kernel knows no groups.
    """
    width, heads = values.shape[-1], q.shape[2]
    if q.dtype == torch.float32 and k.shape[2] < heads:
        k, values = (x.repeat_interleave(heads // x.shape[2], 2) for x in (k, values))
    columns = -(-max(q.shape[-1], width) // 16) * 16
    wide_as = lambda x: F.pad(x, (0, columns - x.shape[-1])) if x.shape[-1] < columns else x  # noqa: E731
    q, k, values = (wide_as(x).transpose(1, 2) for x in (q, k, values))
    how = {"scale": scale, "enable_gqa": q.shape[1] != k.shape[1]}
    if seen is None:
        with sdpa_kernel(_FUSED) if q.is_cuda else contextlib.nullcontext():
            out = F.scaled_dot_product_attention(q, k, values, is_causal=causal, **how)
    else:
        score = None if bias is None else _biased(bias)
        out = _flex(q.device.type)(q, k, values, score, block_mask(seen, k.shape[2]), **how)
    return out.transpose(1, 2)[..., :width]


@functools.cache
def _flex(device: str):
    """fullgraph: where a kernel for new shapes cannot be had, an error, and never the form of T x T scores."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True, fullgraph=True) if device == "cuda" else flex_attention


def _biased(bias: Float[Tensor, "#b #h #tq #t"]):
    """The score_mod that adds a bias, which is broadcast where it has but one entry.

    In 64 bits: FlexAttention's kernel counts in 32, whatever the size of what a score_mod captures.
    """
    whole = [int(size > 1) for size in bias.shape]
    return lambda score, *place: score + bias[tuple(index.long() * varies for index, varies in zip(place, whole))]


def block_mask(seen: Intervals, keys: int):
    """The blocks of keys that each block of queries sees in part and in whole, from its interval: no T x T mask."""
    from torch.nn.attention.flex_attention import BlockMask

    first, end = seen
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
