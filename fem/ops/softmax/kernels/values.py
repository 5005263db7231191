"""The prologue of the softmax read: values become [v | E], E = 2^(w - c) - a with w = beta v log2(e).

c_j is an integer, so that a change of c, by a token that a row may not see, moves no digit of the row's result.
Channels with |w| < 1 throughout have c = 0 and a = 1: E keeps the digits that a small beta needs. Elsewhere a = 0.
What is stored is in units, powers of two by channel, and c is that much lower, so that float16 holds it.

A wide head, where some R is less than proves it, is read again from [v | E] that are formed where they are needed, with
a shift for every SHIFT_ROWS queries: the integer above what these may see.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fem.ops.common.kernels.tiles import exp2_less_one, exp2_shifted, load_rows, store_rows, tf32

CHANNEL_ROWS = tl.constexpr(6)  # of the table of channels: beta log2(e), c, a, the unit of v, that of E, the least R
SHIFT_ROWS = tl.constexpr(64)


@triton.jit
def count(kept, batch, keys):
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
    seen = (rows < count(kept, batch, keys))[:, None]
    place = (batch * tl.num_programs(0) + block) * stride + head * WIDTH + columns
    tl.store(low + place, tl.min(tl.where(seen, x, float("inf")), 0), mask=columns < WIDTH)
    tl.store(high + place, tl.max(tl.where(seen, x, float("-inf")), 0), mask=columns < WIDTH)


@triton.jit
def values_and_exponentials(
    v, kept, channels, values, sums, keys, stride,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """[v | E] in their units, each half PADDED wide, zeros where a key does not count or a channel does not exist.

    channels (B, H, CHANNEL_ROWS, PADDED), values (B, T, H, 2 PADDED), sums (B, blocks, H, PADDED): of E.
    """
    block, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    heads = tl.num_programs(1)
    rows, columns = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, PADDED)
    x = load_rows(v + batch * keys * stride + head * WIDTH, rows, stride, keys, WIDTH, PADDED, True).to(tl.float32)
    seen = (rows < count(kept, batch, keys))[:, None] & (columns < WIDTH)[None, :]
    of_head = channels + (batch * heads + head) * CHANNEL_ROWS * PADDED + columns
    rate, shift, one = tl.load(of_head), tl.load(of_head + PADDED), tl.load(of_head + 2 * PADDED)
    unit_of_v, unit = tl.load(of_head + 3 * PADDED), tl.load(of_head + 4 * PADDED)
    w = x * rate[None, :]
    e = tl.where(one[None, :] > 0, exp2_less_one(w) / unit[None, :], exp2_shifted(w, shift[None, :]))
    e = tl.where(seen, e, 0.0)
    out, wide = values + (batch * keys * heads + head) * 2 * PADDED, heads * 2 * PADDED
    store_rows(out, rows, wide, keys, tl.where(seen, x / unit_of_v[None, :], 0.0), PADDED, PADDED)
    store_rows(out + PADDED, rows, wide, keys, e, PADDED, PADDED)
    tl.store(sums + ((batch * tl.num_programs(0) + block) * heads + head) * PADDED + columns, tl.sum(e, 0))


@triton.jit
def block_shifts(
    high, first, end, channels, wide, shifts, queries, blocks, batch_stride,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Per SHIFT_ROWS queries of a wide head, the integer above w of the keys they may see, in blocks of BLOCK keys.

    high as in `value_bounds`; shifts (B, H, cdiv(T_q, SHIFT_ROWS), PADDED); 0 where a = 1 or nothing is seen.
    """
    block, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    heads = tl.num_programs(1)
    if tl.load(wide + batch * heads + head) == 0:
        return
    columns = tl.arange(0, PADDED)
    top = block * SHIFT_ROWS
    bottom = tl.minimum(top + SHIFT_ROWS, queries) - 1
    begin = tl.load(first + batch * batch_stride + top) // BLOCK
    stop = tl.cdiv(tl.load(end + batch * batch_stride + bottom), BLOCK)
    most = tl.full([PADDED], float("-inf"), tl.float32)
    for start in range(begin, stop, 32):
        rows = start + tl.arange(0, 32)
        inside = (rows < stop)[:, None] & (columns < WIDTH)[None, :]
        at = high + ((batch * blocks + rows[:, None]) * heads + head) * WIDTH + columns[None, :]
        most = tl.maximum(most, tl.max(tl.load(at, mask=inside, other=float("-inf")), 0))
    of_head = channels + (batch * heads + head) * CHANNEL_ROWS * PADDED + columns
    shift = tl.ceil(most * tl.load(of_head))
    some = (most > float("-inf")) & (tl.load(of_head + 2 * PADDED) == 0)
    tl.store(
        shifts + ((batch * heads + head) * tl.num_programs(0) + block) * PADDED + columns, tl.where(some, shift, 0.0)
    )


@triton.jit
def exponentials(w, above, near):
    """E of channels that are near, a = 1, or else of values w <= above."""
    return tl.where(near, exp2_less_one(w), exp2_shifted(tl.minimum(w, above), above))


@triton.jit
def values_tile(
    values, rows, stride, end, of_head, shift,
    DV: tl.constexpr, HALF: tl.constexpr, FORMED: tl.constexpr, PRECISION: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """[v | E] of the rows: as stored, or FORMED of the values themselves with the shifts (HALF,) of some queries.

    of_head: the head's table of channels.
    """
    if FORMED:
        columns = tl.arange(0, 2 * HALF)
        channel = columns % HALF
        inside = (rows < end)[:, None] & (channel < DV)[None, :]
        x = tl.load(values + rows[:, None] * stride + channel[None, :], mask=inside, other=0.0).to(tl.float32)
        rate, above = tl.load(of_head + channel)[None, :], tl.load(shift + channel)[None, :]
        e = exponentials(x * rate, above, tl.load(of_head + 2 * HALF + channel)[None, :] > 0)
        return operand(tl.where((columns < HALF)[None, :], x, e), tl.float32, PRECISION)
    else:
        return load_rows(values, rows, stride, end, 2 * HALF, 2 * HALF, RAGGED)


@triton.jit
def operand(x, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """x as a product takes it."""
    if PRECISION == "tf32":
        return tf32(x)
    else:
        return x.to(DTYPE)
