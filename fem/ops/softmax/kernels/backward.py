"""The backward of the softmax read: three kernels, no atomics.

With G = dF / beta and P, l, R, c, a of the forward,

    g = [dmean | G / (R + a)] / l        delta_t = sum_j g_tj [mean | R]_tj
    dP_ti = sum_j g_tj [v | E]_ij        ds_ti = P_ti (dP_ti - delta_t)        [x | y]_i = sum_t P_ti g_t
    dq_t = scale sum_i ds_ti k_i         dk_i = scale sum_t ds_ti q_t          dv = x + beta (E + a) y
    dbeta_j = sum_i (E_ij + a) y_ij (v_ij - u_j) - sum_t g_tj l_t (R_tj + a) (F_tj - u_j),        u_j = c_j / rate_j

The rounded g and P are the operands everywhere, so that delta, ds and dbeta are differences of what was really summed.
Every row of g stands in float16 by an exponent of its own, 2^n_t g'_t: P then carries 2^(n_t - top), no rounding more,
and the head's sums end with 2^top, top = max_t n_t. Entries that R does not prove have g = 0 here: their gradients come
from the definition. Of wide heads, c stands in the table of shifts, and u is the mean of F.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fem.ops.common.kernels.tiles import LOG2_E, halves, load_rows, log2_shifted, store_rows
from fem.ops.softmax.kernels.forward import add_bias, edge_count, edge_start, interval_of, key_blocks, shifts_at
from fem.ops.softmax.kernels.values import CHANNEL_ROWS, SHIFT_ROWS, count, operand, values_tile


@triton.jit
def row_gradients(
    grad_mean, grad_free, mean, total, weights, channels, shifts, wide, g, exponents, delta, dbeta,
    queries, heads, groups, proven,
    DV: tl.constexpr, HALF: tl.constexpr, FORMED: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """g' (B, T_q, H, 2 HALF), n and delta / 2^n (B, H, T_q), and the rows' part of dbeta (B, blocks, H, HALF)."""
    block, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    key_heads, key_head = heads // groups, head // groups
    if (tl.load(wide + batch * key_heads + key_head) != 0) != FORMED:
        return
    rows, columns = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, HALF)
    place, stride = (batch * queries * heads + head) * DV, heads * DV
    mu = load_rows(mean + place, rows, stride, queries, DV, HALF, True).to(tl.float32)
    r = load_rows(total + place, rows, stride, queries, DV, HALF, True)
    of_mean = load_rows(grad_mean + place, rows, stride, queries, DV, HALF, True).to(tl.float32)
    of_free = load_rows(grad_free + place, rows, stride, queries, DV, HALF, True).to(tl.float32)
    row_place = (batch * heads + head) * queries + rows
    weight = tl.load(weights + row_place, mask=rows < queries, other=0.0)[:, None]
    of_head = channels + (batch * key_heads + key_head) * CHANNEL_ROWS * HALF + columns
    rate, one = tl.load(of_head)[None, :], tl.load(of_head + 2 * HALF)[None, :]
    unit_of_v, unit = tl.load(of_head + 3 * HALF)[None, :], tl.load(of_head + 4 * HALF)[None, :]
    over_centre = tl.zeros_like(rate)
    if FORMED:
        of_block = shifts_at(shifts, batch, key_heads, key_head, block * BLOCK, queries, HALF) + columns
        over_centre = (tl.load(of_block) - tl.load(of_head + HALF))[None, :]

    whole = r * unit + one
    settled = whole >= proven
    per_weight = 1.0 / tl.where(weight > 0, weight, float("inf"))
    slope = tl.where(settled, of_free / rate * LOG2_E * unit / tl.where(settled, whole, 1.0), 0.0) * per_weight
    of_mean = of_mean * unit_of_v * per_weight
    exponent = tl.zeros([BLOCK], tl.float32)
    if g.dtype.element_ty == tl.float16:
        largest = tl.maximum(tl.max(tl.abs(of_mean), 1), tl.max(tl.abs(slope), 1))
        exponent = tl.maximum(((largest.to(tl.int32, bitcast=True) >> 23) - 140).to(tl.float32), -100.0)
        tl.store(exponents + row_place, exponent, mask=rows < queries)
    raised = tl.exp2(exponent)[:, None]
    of_mean = operand(of_mean / raised, g.dtype.element_ty, PRECISION)
    slope = operand(slope / raised, g.dtype.element_ty, PRECISION)
    width, out = heads * 2 * HALF, g + (batch * queries * heads + head) * 2 * HALF
    store_rows(out, rows, width, queries, of_mean, HALF, HALF)
    store_rows(out + HALF, rows, width, queries, slope, HALF, HALF)

    slope = slope.to(tl.float32)
    tl.store(delta + row_place, tl.sum(of_mean.to(tl.float32) * (mu / unit_of_v) + slope * r, 1), mask=rows < queries)
    above = log2_shifted(tl.where(settled, r * unit, 1.0 - one), one, over_centre) / rate
    of_beta = tl.sum(slope * raised * weight * (r + one / unit) * above, 0)
    tl.store(dbeta + ((batch * tl.num_programs(0) + block) * heads + head) * HALF + columns, -of_beta)


@triton.jit
def _accumulate_keys(
    dk, dvalues, start, q, k_tile, tile, values, shifts, of_head, g, bias, first, end, peaks, delta,
    columns, queries, keys, counted, q_stride, values_stride, g_stride, bias_row, bias_column, scale_log2, over_scale,
    DK: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, HALF: tl.constexpr,
    FORMED: tl.constexpr, PRECISION: tl.constexpr, BLOCK_Q: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """dk and [x | y], or [x | (E + a) y] if FORMED, after one more block of queries."""
    rows = start + tl.arange(0, BLOCK_Q)
    q_tile = load_rows(q, rows, q_stride, queries, DK, D, EDGE)
    g_tile = load_rows(g, rows, g_stride, queries, 2 * HALF, 2 * HALF, EDGE)
    peak = tl.load(peaks + rows, mask=rows < queries, other=0.0)
    row_delta = tl.load(delta + rows, mask=rows < queries, other=0.0)
    s = tl.dot(k_tile, tl.trans(q_tile), input_precision="ieee")
    if bias is not None:
        s = add_bias(s, bias, rows[None, :], columns[:, None], queries, keys, bias_row, bias_column, over_scale)
    p = tl.exp2(s * scale_log2 - peak[None, :])
    if EDGE:
        row_first, row_end = interval_of(first, end, rows, queries)
        p = tl.where((columns[:, None] >= row_first) & (columns[:, None] < row_end), p, 0.0)
    weights = operand(p, g_tile.dtype, PRECISION)
    if FORMED:
        shift = shifts + start // SHIFT_ROWS * HALF
        tile = values_tile(values, columns, values_stride, counted, of_head, shift, DV, HALF, True, PRECISION, True)
        place = tl.arange(0, 2 * HALF)
        one = tl.load(of_head + 2 * HALF + place % HALF)[None, :]
        dvalues += tl.dot(weights, g_tile, input_precision=PRECISION) * tl.where(place < HALF, 1.0, tile + one)
    else:
        dvalues = tl.dot(weights, g_tile, dvalues, input_precision=PRECISION)
    ds = p * (tl.dot(tile, tl.trans(g_tile), input_precision=PRECISION) - row_delta[None, :])
    return tl.dot(ds.to(q_tile.dtype), q_tile, dk, input_precision="ieee"), dvalues


@triton.jit
def key_gradients(
    q, k, values, g, kept, bias, first, end, row_blocks, channels, shifts, wide, peaks, delta, tops, dk, dv, dbeta,
    queries, keys, heads, groups, batch_stride, bias_batch, bias_head, bias_row, bias_column,
    scale_log2, over_scale, scale,
    DK: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, HALF: tl.constexpr,
    FORMED: tl.constexpr, PRECISION: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """dk, dv and the keys' part of dbeta (B, blocks, H/groups, HALF), for one block of keys of one key head.

    row_blocks (B or 1, blocks, 4) int32: where the rows that see a block begin, where those begin and end that see the
    whole of it, and where they end; multiples of BLOCK_Q, the last one apart. peaks (B, H, T_q): M - n + top;
    tops (B, H/groups): top.
    """
    block, key_head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    key_heads = heads // groups
    if (tl.load(wide + batch * key_heads + key_head) != 0) != FORMED:
        return
    VALUES: tl.constexpr = DV if FORMED else 2 * HALF
    CROWDED: tl.constexpr = FORMED and HALF > 64  # no registers to keep parts of E in from one pass to the next
    k_place = (batch * keys * key_heads + key_head) * DK
    values += (batch * keys * key_heads + key_head) * VALUES
    on_batch = tl.where(batch_stride > 0, batch, 0)
    first += batch * batch_stride
    end += batch * batch_stride
    row_blocks += (on_batch * tl.num_programs(0) + block) * 4
    of_head = channels + (batch * key_heads + key_head) * CHANNEL_ROWS * HALF
    shifts = shifts_at(shifts, batch, key_heads, key_head, 0, queries, HALF)
    begin, whole, whole_end, stop = (
        tl.load(row_blocks), tl.load(row_blocks + 1), tl.load(row_blocks + 2), tl.load(row_blocks + 3),
    )  # fmt: skip
    columns = block * BLOCK_K + tl.arange(0, BLOCK_K)
    k_stride, values_stride, q_stride, g_stride = key_heads * DK, key_heads * VALUES, heads * DK, heads * 2 * HALF
    counted = count(kept, batch, keys) if FORMED else keys
    k_tile = load_rows(k + k_place, columns, k_stride, keys, DK, D, True)
    tile = None
    if not FORMED:
        tile = load_rows(values, columns, values_stride, keys, 2 * HALF, 2 * HALF, True)

    of_k = tl.zeros([BLOCK_K, D], tl.float32)
    of_values = tl.zeros([BLOCK_K, 2 * HALF], tl.float32)
    before, edges = edge_count(begin, whole, whole_end, stop, BLOCK_Q)
    for head in range(key_head * groups, (key_head + 1) * groups):
        q_head, g_head = q + (batch * queries * heads + head) * DK, g + (batch * queries * heads + head) * 2 * HALF
        row_place = (batch * heads + head) * queries
        bias_of_head = None
        if bias is not None:
            bias_of_head = bias + batch * bias_batch + head * bias_head
        for start in tl.range(whole, whole_end, BLOCK_Q, disable_licm=CROWDED):
            of_k, of_values = _accumulate_keys(
                of_k, of_values, start, q_head, k_tile, tile, values, shifts, of_head, g_head, bias_of_head, first, end,
                peaks + row_place, delta + row_place, columns, queries, keys, counted, q_stride, values_stride,
                g_stride, bias_row, bias_column, scale_log2, over_scale,
                DK, D, DV, HALF, FORMED, PRECISION, BLOCK_Q, False,
            )  # fmt: skip
        for index in tl.range(edges, disable_licm=CROWDED):
            start = edge_start(index, before, begin, whole_end, BLOCK_Q)
            of_k, of_values = _accumulate_keys(
                of_k, of_values, start, q_head, k_tile, tile, values, shifts, of_head, g_head, bias_of_head, first, end,
                peaks + row_place, delta + row_place, columns, queries, keys, counted, q_stride, values_stride,
                g_stride, bias_row, bias_column, scale_log2, over_scale,
                DK, D, DV, HALF, FORMED, PRECISION, BLOCK_Q, True,
            )  # fmt: skip

    raised = tl.exp2(tl.load(tops + batch * key_heads + key_head))
    store_rows(dk + k_place, columns, k_stride, keys, of_k * (scale * raised), DK, D)
    x, posterior = halves(of_values, BLOCK_K, HALF)
    of_head += tl.arange(0, HALF)
    rate, shift, one = tl.load(of_head)[None, :], tl.load(of_head + HALF)[None, :], tl.load(of_head + 2 * HALF)[None, :]
    unit_of_v, unit = tl.load(of_head + 3 * HALF)[None, :], tl.load(of_head + 4 * HALF)[None, :]
    v_tile = load_rows(values, columns, values_stride, counted, DV, HALF, True).to(tl.float32) * unit_of_v
    if not FORMED:
        e_tile = load_rows(values + HALF, columns, values_stride, keys, HALF, HALF, True).to(tl.float32)
        x, posterior = x * (raised / unit_of_v), (e_tile + one / unit) * posterior * raised
    v_place = (batch * keys * key_heads + key_head) * DV
    store_rows(dv + v_place, columns, key_heads * DV, keys, x + rate / LOG2_E * posterior, DV, HALF)
    of_beta = tl.sum(posterior * (v_tile - shift / rate), 0)
    place = ((batch * tl.num_programs(0) + block) * key_heads + key_head) * HALF + tl.arange(0, HALF)
    tl.store(dbeta + place, of_beta)


@triton.jit
def _accumulate_queries(
    dq, start, q, k, values, of_head, shift, g, bias, ds, rows, row_first, row_end, peak, delta, raised,
    queries, keys, counted, k_stride, values_stride, bias_row, bias_column, scale_log2, over_scale,
    DK: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, HALF: tl.constexpr,
    FORMED: tl.constexpr, PRECISION: tl.constexpr, BLOCK_K: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """dq after one more block of keys; stores ds if wanted."""
    columns = start + tl.arange(0, BLOCK_K)
    k_tile = load_rows(k, columns, k_stride, keys, DK, D, EDGE)
    tile = values_tile(values, columns, values_stride, counted, of_head, shift, DV, HALF, FORMED, PRECISION, EDGE)
    s = tl.dot(q, tl.trans(k_tile), input_precision="ieee")
    if bias is not None:
        s = add_bias(s, bias, rows[:, None], columns[None, :], queries, keys, bias_row, bias_column, over_scale)
    p = tl.exp2(s * scale_log2 - peak[:, None])
    if EDGE:
        p = tl.where((columns >= row_first[:, None]) & (columns < row_end[:, None]), p, 0.0)
    of_s = p * (tl.dot(g, tl.trans(tile), input_precision=PRECISION) - delta[:, None])
    if ds is not None:
        inside = (rows[:, None] < queries) & (columns[None, :] < keys)
        tl.store(ds + rows[:, None].to(tl.int64) * keys + columns[None, :], of_s * raised, mask=inside)
    return tl.dot(of_s.to(k_tile.dtype), k_tile, dq, input_precision="ieee")


@triton.jit
def query_gradients(
    q, k, values, g, kept, bias, first, end, channels, shifts, wide, peaks, delta, tops, dq, ds,
    queries, keys, heads, groups, batch_stride, bias_batch, bias_head, bias_row, bias_column,
    scale_log2, over_scale, scale,
    DK: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, HALF: tl.constexpr,
    FORMED: tl.constexpr, PRECISION: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """dq of one block of queries of one head, and its ds (B, H, T_q, T), 0 beforehand, unless None."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    key_heads, key_head = heads // groups, head // groups
    if (tl.load(wide + batch * key_heads + key_head) != 0) != FORMED:
        return
    VALUES: tl.constexpr = DV if FORMED else 2 * HALF
    q_place, row_place = (batch * queries * heads + head) * DK, (batch * heads + head) * queries
    g += (batch * queries * heads + head) * 2 * HALF
    k += (batch * keys * key_heads + key_head) * DK
    values += (batch * keys * key_heads + key_head) * VALUES
    first += batch * batch_stride
    end += batch * batch_stride
    if bias is not None:
        bias += batch * bias_batch + head * bias_head
    if ds is not None:
        ds += row_place * keys
    of_head = channels + (batch * key_heads + key_head) * CHANNEL_ROWS * HALF
    of_block = shifts_at(shifts, batch, key_heads, key_head, block * BLOCK_Q, queries, HALF)
    rows = block * BLOCK_Q + tl.arange(0, BLOCK_Q)
    row_first, row_end = interval_of(first, end, rows, queries)
    begin, whole, whole_end, stop = key_blocks(first, end, block, queries, BLOCK_Q, BLOCK_K)
    k_stride, values_stride, counted = key_heads * DK, key_heads * VALUES, count(kept, batch, keys) if FORMED else keys

    q_tile = load_rows(q + q_place, rows, heads * DK, queries, DK, D, True)
    g_tile = load_rows(g, rows, heads * 2 * HALF, queries, 2 * HALF, 2 * HALF, True)
    peak = tl.load(peaks + row_place + rows, mask=rows < queries, other=0.0)
    row_delta = tl.load(delta + row_place + rows, mask=rows < queries, other=0.0)
    raised = tl.exp2(tl.load(tops + batch * key_heads + key_head))
    of_q = tl.zeros([BLOCK_Q, D], tl.float32)
    for start in range(whole, whole_end, BLOCK_K):
        of_q = _accumulate_queries(
            of_q, start, q_tile, k, values, of_head, of_block, g_tile, bias, ds, rows, row_first, row_end,
            peak, row_delta, raised, queries, keys, counted, k_stride, values_stride, bias_row, bias_column,
            scale_log2, over_scale, DK, D, DV, HALF, FORMED, PRECISION, BLOCK_K, False,
        )  # fmt: skip
    before, edges = edge_count(begin, whole, whole_end, stop, BLOCK_K)
    for index in range(edges):
        start = edge_start(index, before, begin, whole_end, BLOCK_K)
        of_q = _accumulate_queries(
            of_q, start, q_tile, k, values, of_head, of_block, g_tile, bias, ds, rows, row_first, row_end,
            peak, row_delta, raised, queries, keys, counted, k_stride, values_stride, bias_row, bias_column,
            scale_log2, over_scale, DK, D, DV, HALF, FORMED, PRECISION, BLOCK_K, True,
        )  # fmt: skip
    store_rows(dq + q_place, rows, heads * DK, queries, of_q * (scale * raised), DK, D)
