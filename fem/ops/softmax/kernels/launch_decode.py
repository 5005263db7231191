"""The softmax read of a few queries over a cache, without a gradient: split among programs, merged exactly."""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from fem.ops.common.backend import triton_interprets
from fem.ops.common.read import Read
from fem.ops.softmax.kernels import decode as softmax_decode
from fem.ops.softmax.kernels.blocks import padded
from fem.ops.softmax.support import Intervals

MOST_ROWS = 8  # queries times query heads per key head: each costs an exponential per key and channel
_ELEMENTS = 1 << 12  # of a tile
_SHORTEST_SPLIT = 256  # keys
_PROGRAMS = 4 * 132  # that fill an H200


def reads(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, bias: Tensor | None) -> bool:
    """Whether the queries are few and no gradient is asked for."""
    few = q.shape[1] * (q.shape[2] // k.shape[2]) <= MOST_ROWS
    return few and not (
        torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, beta, bias))
    )


def softmax_read(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, intervals: Intervals, bias: Tensor | None, scale: float
) -> Read:
    """Mean and free energy as in `softmax_triton.softmax_read`, exact in float32 at any span, by one pass over k and v.

    k and v may be views of a longer cache: only their last dimension must be contiguous, and nothing is copied.
    """
    if triton_interprets():
        q, k, v = (x.float() for x in (q, k, v))
        bias = None if bias is None else bias.float()
    k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (k, v))
    first, end, _, order = intervals
    return Read(*_decode(q.contiguous(), k, v, beta.contiguous(), bias, order, first, end, scale))


@torch.library.custom_op(
    "fem::softmax_decode_triton",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor beta, Tensor? bias, Tensor? order, Tensor first, Tensor end, "
    "float scale) -> (Tensor mean, Tensor free_energy)",
)
def _decode(q, k, v, beta, bias, order, first, end, scale):
    (batch, queries, heads, dk), (_, keys, key_heads, dv) = q.shape, v.shape
    groups, half = heads // key_heads, padded(dv)
    count = queries * groups
    widths = {"DV": dv, "HALF": half, "ROWS": triton.next_power_of_2(count)}
    splits = split_count(keys, batch * key_heads)
    parts = q.new_empty(batch, key_heads, splits, widths["ROWS"], 2 + 5 * half, dtype=torch.float32)
    peaks, weights, sums = parts.view(-1).split([x * parts[..., 0].numel() for x in (1, 1, 5 * half)])
    softmax_decode.read_split[(splits, key_heads, batch)](
        q, k, v, beta, bias, order, first, end, peaks, weights, sums,
        queries, heads, groups, count, first.stride(0) if len(first) > 1 else 0, keys,
        *k.stride()[:3], *v.stride()[:3], *bias_strides(bias), scale * math.log2(math.e),
        DK=dk, D=padded(dk), **widths, **launch(widths["ROWS"], max(padded(dk), half)),
    )  # fmt: skip
    mean, free_energy = _outputs(q, k, v, beta, bias, order, first, end, scale)
    softmax_decode.merge_splits[(count, key_heads, batch)](
        peaks, weights, sums, beta, mean, free_energy, queries, heads, groups, splits,
        **widths, SPLITS=triton.next_power_of_2(splits), num_warps=4,
    )  # fmt: skip
    return mean, free_energy


@_decode.register_fake
def _outputs(q, k, v, beta, bias, order, first, end, scale):
    shape = (*q.shape[:3], v.shape[3])
    return q.new_empty(shape), q.new_empty(shape)


def split_count(keys: int, heads: int) -> int:
    """As many parts as fill the device with `heads` key heads, none shorter than is worth a program."""
    return max(1, min(-(-_PROGRAMS // heads), keys // _SHORTEST_SPLIT, 64))


def launch(rows: int, width: int) -> dict[str, int]:
    return {"BLOCK": max(4, min(64, _ELEMENTS // (rows * width))), "num_warps": 4, "num_stages": 3}


def bias_strides(bias: Tensor | None) -> tuple[int, ...]:
    """Of (B, H, T_q, T), 0 where the bias is broadcast."""
    if bias is None:
        return 0, 0, 0, 0
    return tuple(stride if size > 1 else 0 for size, stride in zip(bias.shape, bias.stride()))
