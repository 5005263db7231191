"""The softmax read as flash attention over [v | E].

    s_ti = log2(e) (scale q_t . k_i + bias_ti)        P_ti = 2^(s_ti - M_t), M_t an integer by max_i s_ti
    l_t = sum_i P_ti        [mean | R]_t = sum_i P_ti [v | E]_i / l_t        F = (log2(R + a) + c) / rate

A row sees the keys of one interval, first_t <= i < end_t, and both ends never fall as t grows: causality, windows
and documents are all of this form. Key blocks that every row of a program sees whole need no comparison.
Every shift is an integer, so every rescaling is a power of two and the backward meets the same rounded P. The weights l
sum what is multiplied, so that rows of P / l sum to 1 after rounding too. P and E fill the range of
float16, up to 2^15. A launch reads every head as stored and says where R is in doubt, or wide heads as FORMED.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fem.ops.common.kernels.tiles import halves, load_rows, log2_shifted, store_rows
from fem.ops.softmax.kernels.values import CHANNEL_ROWS, SHIFT_ROWS, count, operand, values_tile

NO_SCORE = tl.constexpr(-1e30)


@triton.jit
def interval_of(first, end, rows, queries):
    """The interval of each row; an empty one for rows that do not exist."""
    exists = rows < queries
    return tl.load(first + rows, mask=exists, other=0), tl.load(end + rows, mask=exists, other=0)


@triton.jit
def key_blocks(first, end, block, queries, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr):
    """Where the keys of a query block begin, where those begin and end that all its rows see, and where they end."""
    top = block * BLOCK_Q
    bottom = tl.minimum(top + BLOCK_Q, queries) - 1
    begin = tl.load(first + top) // BLOCK_K * BLOCK_K
    whole = tl.cdiv(tl.load(first + bottom), BLOCK_K) * BLOCK_K
    whole_end = tl.maximum(tl.load(end + top) // BLOCK_K * BLOCK_K, whole)
    return begin, whole, whole_end, tl.load(end + bottom)


@triton.jit
def edge_count(begin, whole, whole_end, end, BLOCK: tl.constexpr):
    """How many blocks lie before the whole ones, and how many before and after them."""
    before = (whole - begin) // BLOCK
    return before, before + tl.maximum(tl.cdiv(end - whole_end, BLOCK), 0)


@triton.jit
def edge_start(index, before, begin, whole_end, BLOCK: tl.constexpr):
    return tl.where(index < before, begin + index * BLOCK, whole_end + (index - before) * BLOCK)


@triton.jit
def add_bias(s, bias, rows, columns, queries, keys, row_stride, column_stride, over_scale):
    """s + bias / scale, for scores that are still to be scaled."""
    inside = (rows < queries) & (columns < keys)
    return s + tl.load(bias + rows * row_stride + columns * column_stride, mask=inside, other=0.0) * over_scale


@triton.jit
def shifts_at(shifts, batch, key_heads, key_head, row, queries, HALF: tl.constexpr):
    """Where the shifts (HALF,) stand of the queries around a row."""
    return shifts + ((batch * key_heads + key_head) * tl.cdiv(queries, SHIFT_ROWS) + row // SHIFT_ROWS) * HALF


@triton.jit
def _attend(
    acc, peak, weight, start, q, k, values, bias, of_head, shift, rows, row_first, row_end, queries, keys, counted,
    k_stride, values_stride, bias_row, bias_column, scale_log2, over_scale,
    DK: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, HALF: tl.constexpr,
    FORMED: tl.constexpr, PRECISION: tl.constexpr, LIFT: tl.constexpr, BLOCK_K: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """acc, M and l after one more block of keys."""
    columns = start + tl.arange(0, BLOCK_K)
    k_tile = load_rows(k, columns, k_stride, keys, DK, D, EDGE)
    tile = values_tile(values, columns, values_stride, counted, of_head, shift, DV, HALF, FORMED, PRECISION, EDGE)
    s = tl.dot(q, tl.trans(k_tile), input_precision="ieee")
    if bias is not None:
        s = add_bias(s, bias, rows[:, None], columns[None, :], queries, keys, bias_row, bias_column, over_scale)
    if EDGE:
        s = tl.where((columns >= row_first[:, None]) & (columns < row_end[:, None]), s, float("-inf"))
    higher = tl.maximum(peak, tl.ceil(tl.max(s, 1) * scale_log2) - LIFT)
    p = operand(tl.exp2(s * scale_log2 - higher[:, None]), tile.dtype, PRECISION)
    shrink = tl.exp2(peak - higher)
    acc = tl.dot(p, tile, acc * shrink[:, None], input_precision=PRECISION)
    return acc, higher, weight * shrink + tl.sum(p.to(tl.float32), 1)


@triton.jit
def read_forward(
    q, k, values, kept, bias, first, end, channels, shifts, wide, mean, free_energy, total, peaks, weights, doubts,
    queries, keys, heads, groups, batch_stride, bias_batch, bias_head, bias_row, bias_column, scale_log2, over_scale,
    DK: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, HALF: tl.constexpr,
    FORMED: tl.constexpr, PRECISION: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One block of queries of one head.

    q (B, T_q, H, DK), k (B, T, H/groups, DK), values (B, T, H/groups, 2 HALF), or v (B, T, H/groups, DV) if FORMED;
    kept, channels, shifts as in softmax_values; bias by strides or None; first, end (B or 1, T_q) int32, batch_stride
    apart; wide (B, H/groups). PRECISION: of the products with [v | E].
    Out: mean, free_energy, total = R (B, T_q, H, DV); peaks = M, weights = l (B, H, T_q), 0 for rows without keys;
    doubts (B, H, blocks): how many R + a are less than their channel's least, unless FORMED.
    """
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest first
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    key_heads, key_head = heads // groups, head // groups
    if FORMED:  # noqa: SIM102 Triton does not skip the second half of an `and`
        if tl.load(wide + batch * key_heads + key_head) == 0:
            return
    VALUES: tl.constexpr = DV if FORMED else 2 * HALF
    LIFT: tl.constexpr = 15 if values.dtype.element_ty == tl.float16 else 0
    q += (batch * queries * heads + head) * DK
    k += (batch * keys * key_heads + key_head) * DK
    values += (batch * keys * key_heads + key_head) * VALUES
    first += batch * batch_stride
    end += batch * batch_stride
    if bias is not None:
        bias += batch * bias_batch + head * bias_head
    of_head = channels + (batch * key_heads + key_head) * CHANNEL_ROWS * HALF
    of_block = shifts_at(shifts, batch, key_heads, key_head, block * BLOCK_Q, queries, HALF)
    rows = block * BLOCK_Q + tl.arange(0, BLOCK_Q)
    row_first, row_end = interval_of(first, end, rows, queries)
    begin, whole, whole_end, stop = key_blocks(first, end, block, queries, BLOCK_Q, BLOCK_K)
    k_stride, values_stride, counted = key_heads * DK, key_heads * VALUES, count(kept, batch, keys) if FORMED else keys

    q_tile = load_rows(q, rows, heads * DK, queries, DK, D, True)
    peak = tl.full([BLOCK_Q], NO_SCORE, tl.float32)
    weight = tl.zeros([BLOCK_Q], tl.float32)
    acc = tl.zeros([BLOCK_Q, 2 * HALF], tl.float32)
    for start in range(whole, whole_end, BLOCK_K):
        acc, peak, weight = _attend(
            acc, peak, weight, start, q_tile, k, values, bias, of_head, of_block, rows, row_first, row_end,
            queries, keys, counted, k_stride, values_stride, bias_row, bias_column, scale_log2, over_scale,
            DK, D, DV, HALF, FORMED, PRECISION, LIFT, BLOCK_K, False,
        )  # fmt: skip
    before, edges = edge_count(begin, whole, whole_end, stop, BLOCK_K)
    for index in range(edges):
        start = edge_start(index, before, begin, whole_end, BLOCK_K)
        acc, peak, weight = _attend(
            acc, peak, weight, start, q_tile, k, values, bias, of_head, of_block, rows, row_first, row_end,
            queries, keys, counted, k_stride, values_stride, bias_row, bias_column, scale_log2, over_scale,
            DK, D, DV, HALF, FORMED, PRECISION, LIFT, BLOCK_K, True,
        )  # fmt: skip

    row_place = (batch * heads + head) * queries + rows
    tl.store(peaks + row_place, peak, mask=rows < queries)
    tl.store(weights + row_place, weight, mask=rows < queries)
    some = weight > 0
    mu, r = halves(acc / tl.where(some, weight, 1.0)[:, None], BLOCK_Q, HALF)
    columns = tl.arange(0, HALF)
    of_head += columns
    rate, one = tl.load(of_head)[None, :], tl.load(of_head + 2 * HALF)[None, :]
    unit_of_v, unit = tl.load(of_head + 3 * HALF)[None, :], tl.load(of_head + 4 * HALF)[None, :]
    shift = tl.load(of_block + columns if FORMED else of_head + HALF)[None, :]
    if not FORMED:
        doubtful = some[:, None] & (r * unit + one < tl.load(of_head + 5 * HALF)[None, :])
        count_place = (batch * heads + head) * tl.num_programs(0) + block
        tl.store(doubts + count_place, tl.sum(tl.sum(doubtful.to(tl.int32), 1), 0))
    place = (batch * queries * heads + head) * DV
    store_rows(mean + place, rows, heads * DV, queries, mu * unit_of_v, DV, HALF)
    store_rows(total + place, rows, heads * DV, queries, r, DV, HALF)
    f = tl.where(some[:, None], log2_shifted(r * unit, one, shift) / rate, 0.0)
    store_rows(free_energy + place, rows, heads * DV, queries, f, DV, HALF)
