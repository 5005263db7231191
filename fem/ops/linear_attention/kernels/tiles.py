"""Tiles of linear attention, and what its kernels take of a chunk's values: E = 2^(rate (v - anchor) - shift).

rate = beta log2(e). The anchor, the value of the chunk's first token, keeps the digits of values that share an offset;
the shift is an integer, so that no digit of what a row reads depends on the tokens after it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fem.ops.common.kernels.tiles import LOG2_E, NOTHING, exp2_shifted
from fem.ops.common.precision import LEAST_PROVEN
from fem.ops.linear_attention import chunk as plain_chunk

PROVEN = tl.constexpr(LEAST_PROVEN[torch.float32])
LIGHT = tl.constexpr(plain_chunk.LIGHT)


@triton.jit
def chunk_of(time, CHUNK: tl.constexpr):
    """The place of the program's chunk, that of its first token in (B, T, H), how many tokens there are from that to
    the end, and the number of heads. Tokens are counted from the chunk's first, so that only places need 64 bits."""
    chunk, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    heads, first = tl.num_programs(1), chunk * CHUNK
    place = (batch * heads + head) * tl.num_programs(0) + chunk
    return place, (batch * time + first) * heads + head, time - first, heads


@triton.jit
def load_tile(matrix, rows, columns, stride, end, WIDTH: tl.constexpr):
    """matrix[rows, columns] with zeros in rows from `end` on and in columns from WIDTH on."""
    inside = (rows[:, None] < end) & (columns[None, :] < WIDTH)
    return tl.load(matrix + rows[:, None] * stride + columns[None, :], mask=inside, other=0.0)


@triton.jit
def store_tile(matrix, rows, columns, stride, end, x, WIDTH: tl.constexpr):
    inside = (rows[:, None] < end) & (columns[None, :] < WIDTH)
    tl.store(matrix + rows[:, None] * stride + columns[None, :], x.to(matrix.dtype.element_ty), mask=inside)


@triton.jit
def rate_and_anchor(beta, v, columns, WIDTH: tl.constexpr):
    """Of the channels of one head; v points to the chunk's first token."""
    there = columns < WIDTH
    rate = tl.load(beta + columns, mask=there, other=1.0) * LOG2_E
    return rate, tl.load(v + columns, mask=there, other=0.0).to(tl.float32)


@triton.jit
def exponentials(v, rate, anchor, shift):
    """E of tokens; at most 1, as tokens above the shift have no weight, and NaN where the value is."""
    w = (v.to(tl.float32) - anchor[None, :]) * rate[None, :]
    return exp2_shifted(tl.where(w > shift[None, :], shift[None, :], w), shift[None, :])


@triton.jit
def log_or_nothing(x):
    return tl.where(x > 0, tl.log(tl.where(x > 0, x, 1.0)), NOTHING)
