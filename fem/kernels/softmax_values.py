"""The prologue of the softmax read: values become [v | E], E = 2^(w - c) - a with w = beta v log2(e).

c_j is an integer, so that a change of c, by a token that a row may not see, moves no digit of the row's result.
Channels with |w| < 1 throughout have c = 0 and a = 1: E keeps the digits that a small beta needs. Elsewhere a = 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fem.kernels.tiles import exp2_less_one, exp2_shifted, load_rows, store_rows


@triton.jit
def _count(kept, batch, keys):
    if kept is None:
        return keys
    return tl.load(kept + batch)


@triton.jit
def value_bounds(
    v, kept, low, high, keys, stride,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Per block of keys and channel, the least and the greatest value; inf and -inf for none.

    v (B, T, H, d_v), kept (B,) int32: how many keys of each row count, the first ones; None: all.
    low, high (B, blocks, H, d_v).
    """
    block, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    rows, columns = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, PADDED)
    x = load_rows(v + batch * keys * stride + head * WIDTH, rows, stride, keys, WIDTH, PADDED, True).to(tl.float32)
    seen = (rows < _count(kept, batch, keys))[:, None]
    place = (batch * tl.num_programs(0) + block) * stride + head * WIDTH + columns
    tl.store(low + place, tl.min(tl.where(seen, x, float("inf")), 0), mask=columns < WIDTH)
    tl.store(high + place, tl.max(tl.where(seen, x, float("-inf")), 0), mask=columns < WIDTH)


@triton.jit
def values_and_exponentials(
    v, kept, channels, values, keys, stride,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """[v | E], each half PADDED wide, and zeros where a key does not count or a channel does not exist.

    channels (B, H, 3, PADDED): beta log2(e), c and a. values (B, T, H, 2 PADDED).
    """
    block, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    heads = tl.num_programs(1)
    rows, columns = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, PADDED)
    x = load_rows(v + batch * keys * stride + head * WIDTH, rows, stride, keys, WIDTH, PADDED, True).to(tl.float32)
    seen = (rows < _count(kept, batch, keys))[:, None] & (columns < WIDTH)[None, :]
    of_head = channels + (batch * heads + head) * 3 * PADDED + columns
    rate, shift, one = tl.load(of_head), tl.load(of_head + PADDED), tl.load(of_head + 2 * PADDED)
    w = x * rate[None, :]
    e = tl.where(one[None, :] > 0, exp2_less_one(w), exp2_shifted(w, shift[None, :]))
    out, wide = values + (batch * keys * heads + head) * 2 * PADDED, heads * 2 * PADDED
    store_rows(out, rows, wide, keys, tl.where(seen, x, 0.0), PADDED, PADDED)
    store_rows(out + PADDED, rows, wide, keys, tl.where(seen, e, 0.0), PADDED, PADDED)
