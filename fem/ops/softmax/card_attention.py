"""Attention on a card by torch's fused kernels, never by the form of T x T scores, and functions compiled there.

Private part of PyTorch: `_dynamo.maybe_mark_dynamic`, of 2.11 to 2.15. It may go when 2.14 is the oldest supported,
whose `torch.compile` takes dimensions that may vary.
"""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fem.ops.common.backend import guarded, multiplies_bfloat16
from fem.ops.common.shared import shared
from fem.ops.softmax.support import Support, bounds

_TILE = 128
WIDEST = 128  # columns of one attention call: two calls of half the width cost half of one padded to 256
_MOST = 256  # columns: flash attention takes no more
_GAP = 192  # columns: with up to 224 flash attention has no gradients on sm_86 and sm_89
# Bytes of shared memory: FlexAttention's own backward blocks take 112 KiB above 128 columns; sm_86, 89 and 120 have 99.
_ROOM, _SMALL_BLOCKS = 112 << 10, {f"bwd_BLOCK_{side}": 32 for side in ("M1", "N1", "M2", "N2")} | {"bwd_num_stages": 1}
_ROWS = 144  # of q, k and the values, which FlexAttention's forward holds there, of a power of 2 of columns
# A bias loaded ahead, as keys are, takes 242 KiB in PyTorch 2.11, and an H100 has 227. Keys of more than 128 columns
# are up to 344, but for those of 256, for which FlexAttention has chosen tiles.
_BIASED, _WIDE = {"num_stages": 1}, {"fwd_num_stages": 1}
_RECOMPILES = 64  # one for each of gradients, few rows, one row, few tokens, one token, dtypes, widths
_CUDNN, _FLASH, _EFFICIENT = (
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
)


def attend_on_card(
    q: Float[Tensor, "b tq h dk"],
    k: Float[Tensor, "b t hkv dk"],
    values: Float[Tensor, "b t hkv w"],
    support: Support,
    lists: Sequence[Tensor] = (),
) -> tuple[Float[Tensor, "b tq h w"], Float[Tensor, "b h tq"] | None]:
    """p @ values, and lse, -inf in rows without keys; None: there are none.

    By scaled dot product attention where causality is all, by FlexAttention elsewhere; lists: the `block_lists` of the
    support, where they are known. Widths are equal multiples of 16, which every fused kernel takes, and key heads are
    repeated in float32 and above 256 columns, where the fused kernel knows no groups.
    """
    width, heads = values.shape[-1], q.shape[2]
    if not width:
        return values.new_zeros(*q.shape[:3], 0), None
    columns = -(-max(q.shape[-1], width) // 16) * 16
    columns = _MOST if _GAP < columns < _MOST else columns
    if (q.dtype == torch.float32 or columns > _MOST) and k.shape[2] < heads:
        # by a list, as its length is a number to a compiler, too: FlexAttention divides heads by heads
        k, values = (torch.stack([x] * (heads // x.shape[2]), 3).flatten(2, 3) for x in (k, values))
    wide_as = lambda x: F.pad(x, (0, columns - x.shape[-1])) if x.shape[-1] < columns else x  # noqa: E731
    q, k, values = (wide_as(x).transpose(1, 2) for x in (q, k, values))
    options = {"scale": support.scale, "enable_gqa": guarded(q.shape[1] != k.shape[1])}
    if support.restricted:
        score = None if support.bias is None else _biased(support.bias)
        sizes = q.shape[2], k.shape[2]
        blocks = block_mask(support, *sizes, lists or block_lists(support, *sizes, q.device))
        out, lse = _flex(q, k, values, score, blocks, **options)
    else:
        with _kernels(columns) if q.is_cuda else contextlib.nullcontext():
            out, lse = F.scaled_dot_product_attention(q, k, values, is_causal=support.causal, **options), None
    return out.transpose(1, 2)[..., :width], lse


@torch.compiler.assume_constant_result
def widest_flexible(device: torch.device) -> float:
    """Bytes of a head's row up to which FlexAttention runs on a device: on a card none before sm_80, later those whose
    tiles find room."""
    if device.type != "cuda":
        return math.inf
    return 2.0 ** int(math.log2(_room(device) / _ROWS)) if multiplies_bfloat16(device) else 0.0


def _room(device: torch.device) -> int:
    """Bytes of shared memory that a block of threads may have."""
    card = torch.cuda.get_device_properties(device)
    return getattr(card, "shared_memory_per_block_optin", None) or card.shared_memory_per_block  # the latter under ROCm


def _kernels(columns: int) -> contextlib.AbstractContextManager:
    """cuDNN's backward may refuse more than 128 columns, so there it comes last."""
    order = [_CUDNN, _FLASH, _EFFICIENT] if columns <= 128 else [_FLASH, _EFFICIENT, _CUDNN]
    return sdpa_kernel(order, set_priority=True)


def _flex(q, k, values, score: Callable | None, blocks, **options) -> tuple:
    """FlexAttention; on a GPU compiled once for each kind of call, and an error where that fails, never the form of
    T x T scores. Its kernel for few queries knows neither gradients nor other lengths, nor all blocks of keys."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    kernel = {"FORCE_USE_FLEX_ATTENTION": True} if q.is_cuda else {}
    kernel |= {} if score is None else _BIASED
    options["return_aux"] = AuxRequest(lse=True)
    if q.is_cuda and q.shape[-1] > WIDEST:
        kernel |= ({} if q.shape[-1] == _MOST else _WIDE) | (_SMALL_BLOCKS if _room(q.device) < _ROOM else {})
    if not q.is_cuda or torch.compiler.is_compiling():
        out, aux = flex_attention(q, k, values, score, blocks, **options, kernel_options=kernel)
        return out, aux.lse
    compiled = _compiled(flex_attention, dynamic=True, fullgraph=True)
    with torch.compiler.config.patch(recompile_limit=_RECOMPILES):
        out, aux = compiled(q, k, values, score, blocks, **options, kernel_options=kernel)
    return out, aux.lse


def _biased(bias: Float[Tensor, "#b #h #tq #t"]):
    """The score_mod that adds a bias, which is broadcast where it has but one entry.

    In 64 bits: FlexAttention's kernel counts in 32, whatever the size of what a score_mod captures.
    """
    varies = [int(size > 1) for size in bias.shape]
    return lambda score, *indices: score + bias[tuple(index.long() * one for index, one in zip(indices, varies))]


@shared
def block_lists(support: Support, queries: int, keys: int, device: torch.device) -> tuple[Tensor, ...]:
    """Which blocks of keys each block of queries sees in part and in whole, and the reverse, as FlexAttention's kernels
    take them: from the queries' bounds, by no T x T mask.
    """
    first, end = bounds(support, queries, keys, device)
    # Neither bound falls with the queries: the opening query of a block has its least, the closing one its greatest.
    opens = torch.arange(0, queries, _TILE, device=device)
    closes = (opens + _TILE - 1).clamp_max(queries - 1)
    least, most = ([x[:, at, None] for x in (first, end)] for at in (opens, closes))
    top = torch.arange(0, keys, _TILE, device=device)
    bottom = top + _TILE
    some = (top < most[1]) & (bottom > least[0])
    full = (top >= most[0]) & (bottom <= least[1])  # a ragged last block never is
    if support.keep is not None:
        count = F.pad(support.keep.int(), (0, -keys % _TILE)).unflatten(1, (-1, _TILE)).sum(2)[:, None]
        some, full = some & (count > 0), full & (count == _TILE)
    chosen, lists = torch.stack(torch.broadcast_tensors(some & ~full, full))[:, :, None], []
    for blocks in (chosen, chosen.mT.contiguous()):  # the kernels take lists in one piece
        size = blocks.shape[-1]
        ranks = 2 * size * blocks.int() - torch.arange(size, device=device, dtype=torch.int32)
        # No sort or sum of the blocks: inductor fuses either with them, and fails where rows and columns are as many.
        ranks, order = ranks.topk(size)
        order, counts = order.int(), (ranks > 0).sum(-1, dtype=torch.int32)
        lists += [counts[0], order[0], counts[1], order[1]]
    return tuple(lists)


def block_mask(support: Support, queries: int, keys: int, lists: Sequence[Tensor]):
    """FlexAttention's mask of a support."""
    from torch.nn.attention.flex_attention import BlockMask

    stored = lambda x: x.as_strided(x.shape, x.stride())  # noqa: E731  (inductor stores what a mask captures only so)
    bounded = bounds(support, queries, keys, lists[0].device)
    first, end = (stored(x.int().contiguous()) for x in bounded)
    keep = None if support.keep is None else stored(support.keep.contiguous())
    many, per_row = int(len(first) > 1), int(keep is not None and len(keep) > 1)

    inside = lambda b, h, row, key: (first[b * many, row] <= key) & (key < end[b * many, row])  # noqa: E731
    kept = lambda b, h, row, key: inside(b, h, row, key) & keep[b * per_row, key]  # noqa: E731
    sees = inside if keep is None else kept
    return BlockMask((queries, keys), *lists, BLOCK_SIZE=(_TILE, _TILE), mask_mod=sees)


def compiled_on_card(function: Callable, x: Tensor) -> Callable:
    """The function compiled, for eager calls on a GPU, where x is; as it is elsewhere and where the compiler fails."""
    if not x.is_cuda or torch.compiler.is_compiling() or function in _UNCOMPILED:
        return function
    return functools.partial(_try_compiled, function)


_UNCOMPILED: set[Callable] = set()


def _try_compiled(function: Callable, *arguments):
    """The function compiled, or from its first failure on as it is, with one warning."""
    for x in torch.utils._pytree.tree_leaves(arguments):  # any number of rows and tokens; loops are fused over the rest
        for dim in range(2 if isinstance(x, Tensor) and x.ndim == 4 else 0):
            torch._dynamo.maybe_mark_dynamic(x, dim)
    try:
        with torch.compiler.config.patch(recompile_limit=_RECOMPILES):
            return _compiled(function)(*arguments)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of whatever kind: without a compiler the functions run as they are
        _UNCOMPILED.add(function)
        warnings.warn(f"torch.compile fails here, so reads take more launches: {error}", stacklevel=2)
        return function(*arguments)


@functools.cache
def _compiled(function: Callable, **options: bool) -> Callable:
    return torch.compile(function, **options)
