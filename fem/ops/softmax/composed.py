"""The softmax read by torch's own operations: an attention kernel between a fused prologue and a fused epilogue.

It runs on a GPU, and wherever `torch.export` traces.
"""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fem.ops.common.packing import Packing
from fem.ops.common.precision import upcast, without_autocast
from fem.ops.common.read import LOG_ZERO, Read
from fem.ops.common.steps import exporting
from fem.ops.softmax.recompute import recompute
from fem.ops.softmax.support import Intervals, Pairs

_TILE = 128
_PROVEN_SPAN = 58.0  # nats: the shift takes up to log 2 more, the rounding of p and e the rest to 60
_WIDEST = 128  # columns of one attention call: two calls of half the width cost half of one padded to 256
_MOST = 256  # columns: flash attention takes no more
_GAP = 192  # columns: with up to 224 flash attention has no gradients on sm_86 and sm_89
# Bytes of shared memory: FlexAttention's own backward blocks take 112 KiB above 128 columns; sm_86, 89 and 120 have 99.
_ROOM, _SMALL_BLOCKS = 112 << 10, {f"bwd_BLOCK_{side}": 32 for side in ("M1", "N1", "M2", "N2")} | {"bwd_num_stages": 1}
_BIASED = {"num_stages": 1}  # a bias loaded ahead, as keys are, takes 242 KiB in PyTorch 2.11, and an H100 has 227
_RECOMPILES = 64  # one for each of gradients, few rows, one row, few tokens, one token, dtypes, widths
_CUDNN, _FLASH, _EFFICIENT = (
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
)


def composed_read(
    q: Tensor, k: Tensor, v: Tensor, f: Tensor, beta: Tensor, pairs: Pairs, span: float = math.inf
) -> Read:
    """The mean of v and the free energy of f under a softmax prior, as a chain of torch's own operations.

    [mean | R] = attention(q, k, [v | e]), where R proves an entry (`packing`); others are computed again from the
    definition in float64. span: what beta (max f - min f) is at most, in nats; up to 58 it proves all entries. A graph
    of `torch.export` computes nothing again: an f more than 58 nats below the largest of its row counts as 58 below.
    FlexAttention reads `pairs.seen` by blocks; without it, scaled dot product attention knows causality. On a GPU,
    16-bit inputs are read in bfloat16, as e would leave float16's range. Shapes as in `read.softmax_read`.
    A row that sees no key reads 0. NaN in a token that is not masked may reach rows that do not see it.
    """
    exported, bias, keep = exporting(), pairs.bias, pairs.keep
    hidden = sees = None
    if exported:
        dtype, mask = upcast(q).dtype, None
        if pairs.restricted():
            mask, sees = _mask_of(q, k, pairs)
        hidden = None if keep is None else ~keep[..., None, None]
        attend = functools.partial(_masked, mask=mask, causal=pairs.causal and mask is None, scale=pairs.scale)
    else:
        dtype = torch.bfloat16 if q.dtype in (torch.bfloat16, torch.float16) else q.dtype
        if keep is not None:
            seen, kept, order = pairs.seen.of_kept(keep)
            k, v, f = (x.take_along_dim(order[:, :, None, None], 1) for x in (k, v, f))
            if bias is not None and bias.shape[3] > 1:
                bias = bias.take_along_dim(order[:, None, None], 3)
            hidden = (torch.arange(k.shape[1], device=k.device) >= kept[:, None])[..., None, None]
            pairs = Pairs.of(bias, None, seen, pairs.causal, pairs.scale)
        if bias is None:
            sees = None if pairs.seen is None else (pairs.first < pairs.end)[..., None, None]
        else:  # it may forbid all that the interval allows
            sees = pairs.seen.any_of(~torch.isneginf(bias).expand(*bias.shape[:3], k.shape[1])).transpose(1, 2)
        attend = functools.partial(_attend, pairs=pairs)
    with without_autocast(q.device):
        q, k, v = (x.to(dtype) for x in (q, k, v))
        together = exported or v.shape[3] + f.shape[3] <= max(_WIDEST, q.shape[3])
        parts, shift, small = fused(_prologue, q)(v, f, beta, hidden, together)
        out = [attend(q, k, part) for part in parts]
        mean, free_energy, doubtful = fused(_epilogue, q)(out, beta, shift, small, sees)
        if exported or not f.shape[3] or span <= _PROVEN_SPAN:
            return Read(mean, free_energy)
        return Read(mean, recompute(free_energy, doubtful, q, k, f, beta, pairs))


def _prologue(v, f, beta, hidden: Tensor | None, together: bool) -> tuple[list[Tensor], Tensor, Tensor | None]:
    """[v | e] in one piece or in two, the shift (B, 1, H, d_f), and where e is exp(.) - 1; hidden (B, T, 1, 1)."""
    f = upcast(f)
    packing = Packing.of(f, upcast(beta)[None, None], hidden)
    z = packing.exponents(f)
    if exporting():
        z = z.clamp_min(-_PROVEN_SPAN)
    if hidden is not None:
        v, z = v.masked_fill(hidden, 0.0), z.masked_fill(hidden, 0.0)
    parts = [v, packing.energies(z).to(v.dtype)]
    return [torch.cat(parts, -1)] if together else parts, packing.shift, packing.small


def _epilogue(
    out: list[Tensor], beta: Tensor, shift: Tensor, small: Tensor | None, sees: Bool[Tensor, "#b #tq #h 1"] | None
) -> tuple[Float[Tensor, "b tq h dv"], Float[Tensor, "b tq h df"], Bool[Tensor, "b tq h df"]]:
    """Mean, free energy, and where it is not proven."""
    channels = beta.shape[1]
    mean, total = out if len(out) > 1 else out[0].split((out[0].shape[-1] - channels, channels), -1)
    total = upcast(total)
    packing = Packing(upcast(beta)[None, None], shift, small).per_query_head(total.shape[2])
    doubtful = packing.doubtful(total)
    total = torch.where(doubtful if sees is None else doubtful | ~sees, 1.0, total)
    free_energy = packing.shift + packing.logarithm(total) / packing.beta
    if sees is None:
        return mean, free_energy, doubtful
    return torch.where(sees, mean, 0.0), torch.where(sees, free_energy, 0.0), doubtful & sees


def fused(function: Callable, x: Tensor) -> Callable:
    """The function compiled, for eager calls on a GPU, where x is; as it is elsewhere and where the compiler fails."""
    if not x.is_cuda or torch.compiler.is_compiling() or function in _UNFUSED:
        return function
    return functools.partial(_try_fused, function)


_UNFUSED: set[Callable] = set()


def _try_fused(function: Callable, *arguments):
    for x in torch.utils._pytree.tree_leaves(arguments):  # any number of rows and tokens; loops are fused over the rest
        for dim in range(2 if isinstance(x, Tensor) and x.ndim == 4 else 0):
            torch._dynamo.maybe_mark_dynamic(x, dim)
    try:
        with torch._dynamo.config.patch(recompile_limit=_RECOMPILES):
            return _compiled(function)(*arguments)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of whatever kind: without a compiler the functions run as they are
        _UNFUSED.add(function)
        warnings.warn(f"torch.compile fails here, so reads take more launches: {error}", stacklevel=2)
        return function(*arguments)


@functools.cache
def _compiled(function: Callable, **options: bool) -> Callable:
    return torch.compile(function, **options)


def _masked(q, k, values, mask: Tensor | None, causal: bool, scale: float) -> Float[Tensor, "b tq h w"]:
    """p @ values under a table of what is added to the scores."""
    per_head = lambda x: x.repeat_interleave(q.shape[2] // x.shape[2], 2)  # noqa: E731
    q, k, values = (x.transpose(1, 2) for x in (q, per_head(k), per_head(values)))
    return F.scaled_dot_product_attention(q, k, values, mask, is_causal=causal, scale=scale).transpose(1, 2)


def _attend(q, k, values, pairs: Pairs) -> Float[Tensor, "b tq h w"]:
    """p @ values by torch's attention: scaled dot product without a restriction by pairs, FlexAttention with one.

    Never by the form that materialises T x T scores on a GPU: widths are equal multiples of 16, which every fused
    kernel takes, and key heads are repeated in float32 and above 256 columns, where the fused kernel knows no groups.
    """
    width, heads = values.shape[-1], q.shape[2]
    if not width:
        return values.new_zeros(*q.shape[:3], 0)
    columns = -(-max(q.shape[-1], width) // 16) * 16
    columns = _MOST if _GAP < columns < _MOST else columns
    if (q.dtype == torch.float32 or columns > _MOST) and k.shape[2] < heads:
        k, values = (x.repeat_interleave(heads // x.shape[2], 2) for x in (k, values))
    wide_as = lambda x: F.pad(x, (0, columns - x.shape[-1])) if x.shape[-1] < columns else x  # noqa: E731
    q, k, values = (wide_as(x).transpose(1, 2) for x in (q, k, values))
    options = {"scale": pairs.scale, "enable_gqa": q.shape[1] != k.shape[1]}
    if pairs.seen is None:
        with _kernels(columns) if q.is_cuda else contextlib.nullcontext():
            out = F.scaled_dot_product_attention(q, k, values, is_causal=pairs.causal, **options)
    else:
        score = None if pairs.bias is None else _biased(pairs.bias)
        out = _flex(q, k, values, score, block_mask(pairs.seen, k.shape[2]), **options)
    return out.transpose(1, 2)[..., :width]


def _kernels(columns: int) -> contextlib.AbstractContextManager:
    """cuDNN's backward may refuse more than 128 columns, so there it comes last."""
    order = [_CUDNN, _FLASH, _EFFICIENT] if columns <= 128 else [_FLASH, _EFFICIENT, _CUDNN]
    return sdpa_kernel(order, set_priority=True)


def _flex(q, k, values, score: Callable | None, blocks, **options) -> Tensor:
    """FlexAttention; on a GPU compiled once for each kind of call, and an error where that fails, never the form of
    T x T scores. Its kernel for few queries knows neither gradients nor other lengths."""
    from torch.nn.attention.flex_attention import flex_attention

    kernel = {} if score is None else _BIASED
    if q.is_cuda and q.shape[-1] > _WIDEST:
        room = torch.cuda.get_device_properties(q.device).shared_memory_per_block_optin
        kernel = kernel | _SMALL_BLOCKS if room < _ROOM else kernel
    if not q.is_cuda or torch.compiler.is_compiling():
        return flex_attention(q, k, values, score, blocks, **options, kernel_options=kernel)
    compiled = _compiled(flex_attention, dynamic=True, fullgraph=True)
    kernel = kernel | {"FORCE_USE_FLEX_ATTENTION": True}
    with torch._dynamo.config.patch(recompile_limit=_RECOMPILES):
        return compiled(q, k, values, score, blocks, **options, kernel_options=kernel)


def _biased(bias: Float[Tensor, "#b #h #tq #t"]):
    """The score_mod that adds a bias, which is broadcast where it has but one entry.

    In 64 bits: FlexAttention's kernel counts in 32, whatever the size of what a score_mod captures.
    """
    varies = [int(size > 1) for size in bias.shape]
    return lambda score, *indices: score + bias[tuple(index.long() * one for index, one in zip(indices, varies))]


def block_mask(seen: Intervals, keys: int):
    """The blocks of keys that each block of queries sees in part and in whole, from its interval: no T x T mask."""
    from torch.nn.attention.flex_attention import BlockMask

    first, end = (x.as_strided(x.shape, x.stride()) for x in seen)  # inductor stores what a mask captures only so
    rows = first.shape[1]
    # Neither end falls with the queries: the opening query of a block has its least, the closing one its greatest.
    opens = torch.arange(0, rows, _TILE, device=first.device)
    closes = (opens + _TILE - 1).clamp_max(rows - 1)
    least, most = ([x[:, at, None] for x in (first, end)] for at in (opens, closes))
    top = torch.arange(0, keys, _TILE, device=first.device)
    bottom = top + _TILE
    some = (top < most[1]) & (bottom > least[0])
    full = (top >= most[0]) & (bottom <= least[1])  # a ragged last block never is
    chosen = torch.stack([some & ~full, full])[:, :, None]
    listed = {}
    for side, blocks in (("kv", chosen), ("q", chosen.mT.contiguous())):  # the kernels take lists in one piece
        counts = blocks.sum(-1, dtype=torch.int32)
        order = blocks.int().argsort(dim=-1, descending=True, stable=True).int()
        listed |= {f"{side}_num_blocks": counts[0], f"full_{side}_num_blocks": counts[1]}
        listed |= {f"{side}_indices": order[0], f"full_{side}_indices": order[1]}

    many = int(len(first) > 1)
    sees = lambda b, h, row, key: (first[b * many, row] <= key) & (key < end[b * many, row])  # noqa: E731
    return BlockMask(seq_lengths=(rows, keys), **listed, BLOCK_SIZE=(_TILE, _TILE), mask_mod=sees)


# --- in a graph of `torch.export`: a mask of all pairs ---------------------------------------------------------------


def _mask_of(q: Tensor, k: Tensor, pairs: Pairs) -> tuple[Float[Tensor, "#b #h #tq t"], Bool[Tensor, "#b #tq #h 1"]]:
    """What is added to the scores, and which rows see anything."""
    allowed = pairs.allowed(q.shape[1], k.shape[1], q.device)
    zero = torch.zeros((), dtype=upcast(q).dtype, device=q.device)
    mask = torch.where(allowed, zero if pairs.bias is None else upcast(pairs.bias), LOG_ZERO)
    return mask, allowed.any(-1, keepdim=True).transpose(1, 2)
