"""The softmax read of a few queries over a long cache of keys and values, split among programs and merged exactly.

    s_ti = log2(e) (scale q_t . k_i + bias_ti)        p_ti = 2^(s_ti - M_t) / l_t,  l_t = sum_i 2^(s_ti - M_t)
    mean_t = sum_i p_ti v_i        F_tj = (log2(sum_i p_ti 2^(w_ij - c_tj)) + c_tj) / rate_j,        w = rate v

Every program reads its part of k and v once, for all queries that share a key head. M_t and c_tj are integers above
what each sum has met, kept per query and channel: no term that counts underflows, so no F is in doubt, at any span.
Where |w| < 1 throughout, F = log2(1 + sum_i p_ti (2^w_ij - 1)) / rate_j keeps the digits of a small beta.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fem.ops.common.kernels.tiles import LOG2_E, exp2_less_one, log2_shifted

NOTHING = tl.constexpr(-1e30)
SUMS = tl.constexpr(5)  # per query and channel: of v, of the exponentials, their shift c, of 2^w - 1, and max |w|


@triton.jit
def read_split(
    q, k, v, beta, bias, order, first, end, peaks, weights, sums,
    queries, heads, groups, rows_of_head, interval_stride, order_stride,
    k_batch, k_time, k_head, v_batch, v_time, v_head, bias_batch, bias_head, bias_row, bias_column, scale_log2,
    DK: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, HALF: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sums over one part of the keys.

    q (B, T_q, H, DK) contiguous; k (B, T, H/groups, DK), v (B, T, H/groups, DV), bias or None, by strides;
    beta (H/groups, DV); order (B, T) int64: where the keys stand that the intervals count, None: in their order;
    first, end (B or 1, T_q) int32. Row r of a head is query r // groups of query head r % groups of its group.
    Out: peaks = M, weights = l (B, H/groups, splits, ROWS), sums (B, H/groups, splits, ROWS, 5, HALF).
    """
    split, key_head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    splits, key_heads = tl.num_programs(0), tl.num_programs(1)
    r, d, j = tl.arange(0, ROWS), tl.arange(0, D), tl.arange(0, HALF)
    exists = r < rows_of_head
    query, head = r // groups, key_head * groups + r % groups
    q_rows = tl.load(
        q + ((batch * queries + query) * heads + head)[:, None] * DK + d[None, :],
        mask=exists[:, None] & (d < DK)[None, :], other=0.0,
    ).to(tl.float32) * scale_log2  # fmt: skip
    rate = tl.load(beta + key_head * DV + j, mask=j < DV, other=1.0).to(tl.float32) * LOG2_E
    first += batch * interval_stride
    end += batch * interval_stride
    row_first, row_end = tl.load(first + query, mask=exists, other=0), tl.load(end + query, mask=exists, other=0)
    begin, stop = tl.load(first), tl.load(end + queries - 1)
    share = tl.cdiv(tl.cdiv(stop - begin, splits), BLOCK) * BLOCK
    begin += split * share
    stop = tl.minimum(begin + share, stop)

    peak = tl.full([ROWS], NOTHING, tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    of_v = tl.zeros([ROWS, HALF], tl.float32)
    above = tl.full([ROWS, HALF], NOTHING, tl.float32)
    of_e = tl.zeros([ROWS, HALF], tl.float32)
    of_less = tl.zeros([ROWS, HALF], tl.float32)
    widest = tl.zeros([HALF], tl.float32)
    for start in range(begin, stop, BLOCK):
        i = start + tl.arange(0, BLOCK)
        inside = i < stop
        at = i.to(tl.int64)
        if order is not None:
            at = tl.load(order + batch * order_stride + i, mask=inside, other=0)
        k_at = k + batch * k_batch + key_head * k_head + at[:, None] * k_time + d[None, :]
        k_tile = tl.load(k_at, mask=inside[:, None] & (d < DK)[None, :], other=0.0).to(tl.float32)
        v_at = v + batch * v_batch + key_head * v_head + at[:, None] * v_time + j[None, :]
        v_tile = tl.load(v_at, mask=inside[:, None] & (j < DV)[None, :], other=0.0).to(tl.float32)
        s = tl.sum(q_rows[:, None, :] * k_tile[None, :, :], 2)
        seen = (i[None, :] >= row_first[:, None]) & (i[None, :] < tl.minimum(row_end, stop)[:, None])
        if bias is not None:
            of_row = bias + batch * bias_batch + head * bias_head + query * bias_row
            more = tl.load(of_row[:, None] + at[None, :] * bias_column, mask=seen & exists[:, None], other=0.0)
            s += more.to(tl.float32) * LOG2_E
        s = tl.where(seen, s, float("-inf"))
        w = v_tile * rate[None, :]

        higher = tl.maximum(peak, tl.ceil(tl.max(s, 1)))
        shrink = tl.exp2(peak - higher)
        s -= higher[:, None]
        p = tl.exp2(s)
        weight = weight * shrink + tl.sum(p, 1)
        of_v = of_v * shrink[:, None] + tl.sum(p[:, :, None] * v_tile[None, :, :], 1)
        less = exp2_less_one(tl.minimum(tl.maximum(w, -1.0), 1.0))
        of_less = of_less * shrink[:, None] + tl.sum(p[:, :, None] * less[None, :, :], 1)
        widest = tl.maximum(widest, tl.max(tl.abs(w), 0))
        joint = s[:, :, None] + w[None, :, :]
        lowered = above + (peak - higher)[:, None]
        above = tl.maximum(lowered, tl.ceil(tl.max(joint, 1)))
        of_e = of_e * tl.exp2(lowered - above) + tl.sum(tl.exp2(joint - above[:, None, :]), 1)
        peak = higher

    part = ((batch * key_heads + key_head) * splits + split) * ROWS + r
    tl.store(peaks + part, peak)
    tl.store(weights + part, weight)
    place = sums + part[:, None] * SUMS * HALF + j[None, :]
    tl.store(place, of_v)
    tl.store(place + HALF, of_e)
    tl.store(place + 2 * HALF, above)
    tl.store(place + 3 * HALF, of_less)
    tl.store(place + 4 * HALF, tl.zeros_like(of_v) + widest[None, :])


@triton.jit
def merge_splits(
    peaks, weights, sums, beta, mean, free_energy, queries, heads, groups, splits,
    DV: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """mean, free_energy (B, T_q, H, DV) of one row; 0 where it sees no key. SPLITS: a power of two, at least splits."""
    row, key_head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    split, j = tl.arange(0, SPLITS), tl.arange(0, HALF)
    exists = split < splits
    part = ((batch * tl.num_programs(1) + key_head) * splits + split) * ROWS + row
    peak = tl.load(peaks + part, mask=exists, other=NOTHING)
    top = tl.max(peak, 0)
    shrink = tl.exp2(peak - top)
    weight = tl.sum(tl.load(weights + part, mask=exists, other=0.0) * shrink, 0)
    place = sums + part[:, None] * SUMS * HALF + j[None, :]
    of_v = tl.sum(tl.load(place, mask=exists[:, None], other=0.0) * shrink[:, None], 0)
    above = tl.load(place + 2 * HALF, mask=exists[:, None], other=NOTHING) + (peak - top)[:, None]
    highest = tl.max(above, 0)
    raised = tl.exp2(above - highest[None, :])
    of_e = tl.sum(tl.load(place + HALF, mask=exists[:, None], other=0.0) * raised, 0)
    of_less = tl.sum(tl.load(place + 3 * HALF, mask=exists[:, None], other=0.0) * shrink[:, None], 0)
    widest = tl.max(tl.load(place + 4 * HALF, mask=exists[:, None], other=0.0), 0)

    some = weight > 0
    weight = tl.where(some, weight, 1.0)
    rate = tl.load(beta + key_head * DV + j, mask=j < DV, other=1.0).to(tl.float32) * LOG2_E
    near = (widest < 1).to(tl.float32)
    total = tl.where(widest < 1, of_less, of_e) / weight
    f = log2_shifted(tl.where(some, total, 1.0), near, tl.where(widest < 1, 0.0, highest)) / rate
    out = ((batch * queries + row // groups) * heads + key_head * groups + row % groups) * DV + j
    tl.store(mean + out, (of_v / weight).to(mean.dtype.element_ty), mask=j < DV)
    tl.store(free_energy + out, tl.where(some, f, 0.0).to(free_energy.dtype.element_ty), mask=j < DV)
