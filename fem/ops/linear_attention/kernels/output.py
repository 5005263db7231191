"""What each token of a chunk reads from the state before the chunk and from the chunk itself, and its gradient.

Items are the key channels c of the state, of weight W_c and energy X_cj, and the tokens i of the chunk:

    Z_t = sum_c left_tc W_c + sum_i A_ti        mean_tj = (sum_c left_tc W_c mean_cj + sum_i A_ti v_ij) / Z_t
    R_tj = sum_c left_tc X_cj + sum_i A_ti E_ij        F_tj = anchor_j + (log2(R_tj / Z_t) + shift_j) / rate_j
    W_c = exp(log w_c - scale)        X_cj = 2^(rate_j (F_cj - anchor_j) - shift_j) W_c        A, Z: over e^scale too

left_tc = q_tc exp(sum of the decays up to t). With G = dF / beta, g = dmean / Z, h = G / R and
y_t = (dlog Z_t - sum_j (dmean mean + G)_tj) / Z_t, item n = (1, mean or v, energy) of score s has

    ds_tn = 1_n y_t + sum_j (mean_nj g_tj + energy_nj h_tj)        d(item)_n = sum_t s_tn (y_t, g_t, h_t)
    dbeta_j = sum_n energy_nj (sum_t s_tn h_tj) (F_nj - u_j) - sum_t G_tj log(R_tj / Z_t) / beta_j

with u = anchor + shift / rate, F_nj = v_ij for tokens. Tokens with Z or R < e^-60 are in doubt.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fem.ops.common.kernels.tiles import LN_2, LOG2_E, log2_shifted
from fem.ops.linear_attention.kernels.tiles import (
    LIGHT,
    NOTHING,
    PROVEN,
    chunk_of,
    exponentials,
    load_tile,
    rate_and_anchor,
    store_tile,
)


@triton.jit
def scale_of(log_weight, DK: tl.constexpr, KEYS: tl.constexpr):
    """The greatest log_weight, where it needs scaling."""
    keys = tl.arange(0, KEYS)
    heaviest = tl.max(tl.load(log_weight + keys, mask=keys < DK, other=NOTHING), 0)
    return tl.where(heaviest > LIGHT, heaviest, 0.0)


@triton.jit
def state_before(place):
    """The place of the state that the chunk reads: there is one more state per row than there are chunks."""
    return place + place // tl.num_programs(0)


@triton.jit
def shift_of(
    peaks, log_weight, free_energy, scale, rate, anchor, columns,
    DK: tl.constexpr, DV: tl.constexpr, VALUES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The smallest integer above rate (v - anchor) of all tokens and of all key channels, these with their weights."""
    top = (tl.load(peaks + columns, mask=columns < DV, other=0.0) - anchor) * rate
    for start in range(0, DK, BLOCK):
        keys = start + tl.arange(0, BLOCK)
        weight = tl.load(log_weight + keys, mask=keys < DK, other=NOTHING) - scale
        energy = (load_tile(free_energy, keys, columns, DV, DK, DV) - anchor[None, :]) * rate[None, :]
        top = tl.maximum(top, tl.max(energy + (weight * LOG2_E)[:, None], 0))
    return tl.ceil(top)


@triton.jit
def read(
    left, pairs, v, beta, log_weight, mean, free_energy, peaks,
    read_weight, read_mean, read_free, weight, total, shifts, doubt, time,
    DK: tl.constexpr, DV: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """left (B, T, H, DK), pairs = A (B, H, N, CHUNK, CHUNK), v (B, T, H, DV), beta (H, DV) or None; the state at the
    boundaries (B, H, N + 1, ...), peaks (B, H, N, DV).

    Out: read_weight = log Z and weight = Z (B, T, H), read_mean, read_free and total = R (B, T, H, DV); shifts
    (B, H, N, DV), doubt (B, H, N, CHUNK).
    """
    place, of_row, end, heads = chunk_of(time, CHUNK)
    of_state = state_before(place)
    rows, columns = tl.arange(0, CHUNK), tl.arange(0, VALUES)
    left += of_row * DK
    v += of_row * DV
    log_weight += of_state * DK
    mean += of_state * DK * DV
    v_tile = load_tile(v, rows, columns, heads * DV, end, DV)
    dtype = v_tile.dtype

    scale = scale_of(log_weight, DK, KEYS)
    shrink = tl.exp(-scale)
    a = load_tile(pairs + place * CHUNK * CHUNK, rows, rows, CHUNK, CHUNK, CHUNK).to(tl.float32) * shrink
    a = a.to(dtype)
    z = tl.sum(a.to(tl.float32), 1)
    numerator = tl.dot(a, v_tile, input_precision="ieee")
    if beta is not None:
        free_energy += of_state * DK * DV
        rate, anchor = rate_and_anchor(beta + tl.program_id(1) * DV, v, columns, DV)
        shift = shift_of(
            peaks + place * DV, log_weight, free_energy, scale, rate, anchor, columns, DK, DV, VALUES, BLOCK
        )
        tl.store(shifts + place * DV + columns, shift, mask=columns < DV)
        r = tl.dot(a, exponentials(v_tile, rate, anchor, shift).to(dtype), input_precision="ieee")
    for start in range(0, DK, BLOCK):
        keys = start + tl.arange(0, BLOCK)
        left_tile = load_tile(left, rows, keys, heads * DK, end, DK)
        log_w = tl.load(log_weight + keys, mask=keys < DK, other=NOTHING) - scale
        w = tl.exp(log_w)
        z += tl.sum(left_tile.to(tl.float32) * w[None, :], 1)
        mu = load_tile(mean, keys, columns, DV, DK, DV)
        numerator = tl.dot(left_tile, (w[:, None] * mu).to(dtype), numerator, input_precision="ieee")
        if beta is not None:
            f = load_tile(free_energy, keys, columns, DV, DK, DV)
            energy = (f - anchor[None, :]) * rate[None, :] + (log_w * LOG2_E)[:, None]
            r = tl.dot(left_tile, tl.exp2(energy - shift[None, :]).to(dtype), r, input_precision="ieee")

    row_place = of_row + rows * heads
    inside = rows < end
    some = (z != 0)[:, None]  # as NaN is
    over = tl.where(some, z[:, None], 1.0)
    lost = z < PROVEN
    tl.store(weight + row_place, z, mask=inside)
    tl.store(read_weight + row_place, tl.where(z != 0, tl.log(tl.where(z != 0, z, 1.0)) + scale, NOTHING), mask=inside)
    store_tile(read_mean + of_row * DV, rows, columns, heads * DV, end, tl.where(some, numerator / over, 0.0), DV)
    if beta is not None:
        lost |= tl.min(tl.where(columns[None, :] < DV, r, 1.0), 1) < PROVEN
        ratio = tl.where(r != 0, r, 1.0) / over
        f = anchor[None, :] + log2_shifted(ratio, 0.0, shift[None, :]) / rate[None, :]
        f = tl.where(ratio == ratio, f, ratio)  # NaN has no such digits
        store_tile(total + of_row * DV, rows, columns, heads * DV, end, r, DV)
        store_tile(read_free + of_row * DV, rows, columns, heads * DV, end, tl.where(some, f, 0.0), DV)
    tl.store(doubt + place * CHUNK + rows, (lost & inside).to(tl.int8))


@triton.jit
def _row_operands(
    place, of_row, rows, columns, rate, fallback, weight, total, of_mean, of_free, heads, end,
    DV: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """g and h in the dtype of the matrix products, 1 / Z, and R, which is 1 where doubt makes h 0. h and R have no
    meaning without a rate (Triton 3.5 cannot return None)."""
    z = tl.load(weight + of_row + rows * heads, mask=rows < end, other=0.0)
    sure = (z >= PROVEN) & (tl.load(fallback + place) == 0)
    over = 1.0 / tl.where(sure, z, float("inf"))
    g = (load_tile(of_mean + of_row * DV, rows, columns, heads * DV, end, DV) * over[:, None]).to(DTYPE)
    h, r = g, over
    if rate is not None:
        r = load_tile(total + of_row * DV, rows, columns, heads * DV, end, DV)
        proven = sure[:, None] & (r >= PROVEN)
        r = tl.where(proven, r, 1.0)
        per_nat = load_tile(of_free + of_row * DV, rows, columns, heads * DV, end, DV) / (rate * LN_2)[None, :]
        h = tl.where(proven, per_nat / r, 0.0).to(DTYPE)
    return g, h, over, r


@triton.jit
def state_gradients(
    left, v, beta, log_weight, mean, free_energy, shifts, fallback, read_mean, weight, total, of_weight, of_mean,
    of_free, slopes, dleft, dlog_weight, dmean, dfree_energy, dbeta, time,
    DK: tl.constexpr, DV: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """From the gradients of_weight (B, T, H) of log Z, of_mean and of_free (B, T, H, DV): slopes = y (B, T, H), dleft
    (B, T, H, DK), of the state before each chunk dlog_weight, dmean and dfree_energy (B, H, N, ...), and the part of
    dbeta (B, H, N, DV) that is not the tokens'. Nothing passes through chunks of another fallback (B, H, N)."""
    place, of_row, end, heads = chunk_of(time, CHUNK)
    of_state = state_before(place)
    rows, columns = tl.arange(0, CHUNK), tl.arange(0, VALUES)
    dtype: tl.constexpr = v.dtype.element_ty
    log_weight += of_state * DK
    mean += of_state * DK * DV
    scale = scale_of(log_weight, DK, KEYS)
    rate = None
    if beta is not None:
        free_energy += of_state * DK * DV
        rate, anchor = rate_and_anchor(beta + tl.program_id(1) * DV, v + of_row * DV, columns, DV)
        shift = tl.load(shifts + place * DV + columns, mask=columns < DV, other=0.0)
    g, h, over, r = _row_operands(
        place, of_row, rows, columns, rate, fallback, weight, total, of_mean, of_free, heads, end, DV, dtype
    )
    inside = rows < end
    y = tl.load(of_weight + of_row + rows * heads, mask=inside, other=0.0) * over
    y -= tl.sum(g.to(tl.float32) * load_tile(read_mean + of_row * DV, rows, columns, heads * DV, end, DV), 1)
    if beta is not None:
        per_nat = h.to(tl.float32) * r
        y -= tl.sum(per_nat, 1) * over
        of_beta = -tl.sum(tl.where(per_nat != 0, per_nat * tl.log2(r * over[:, None]), 0.0), 0) / rate
    tl.store(slopes + of_row + rows * heads, y, mask=inside)
    for start in range(0, DK, BLOCK):
        keys = start + tl.arange(0, BLOCK)
        left_tile = load_tile(left + of_row * DK, rows, keys, heads * DK, end, DK)
        log_w = tl.load(log_weight + keys, mask=keys < DK, other=NOTHING) - scale
        w = tl.exp(log_w)
        mu = load_tile(mean, keys, columns, DV, DK, DV)
        of_left = tl.dot(g, tl.trans((w[:, None] * mu).to(dtype)), input_precision="ieee") + y[:, None] * w[None, :]
        of_mu = tl.dot(tl.trans(left_tile), g, input_precision="ieee") * w[:, None]
        store_tile(dmean + place * DK * DV, keys, columns, DV, DK, of_mu, DV)
        of_w = tl.sum(left_tile.to(tl.float32) * y[:, None], 0) * w + tl.sum(of_mu * mu, 1)
        if beta is not None:
            f = load_tile(free_energy, keys, columns, DV, DK, DV) - anchor[None, :]
            energy = tl.exp2(f * rate[None, :] + (log_w * LOG2_E)[:, None] - shift[None, :]).to(dtype)
            of_left = tl.dot(h, tl.trans(energy), of_left, input_precision="ieee")
            of_energy = tl.dot(tl.trans(left_tile), h, input_precision="ieee") * energy.to(tl.float32)
            of_f = of_energy * (rate * LN_2)[None, :]
            store_tile(dfree_energy + place * DK * DV, keys, columns, DV, DK, of_f, DV)
            of_w += tl.sum(of_energy, 1)
            of_beta += tl.sum(of_energy * (f - (shift / rate)[None, :]), 0)
        store_tile(dleft + of_row * DK, rows, keys, heads * DK, end, of_left, DK)
        tl.store(dlog_weight + place * DK + keys, of_w, mask=keys < DK)
    if beta is not None:
        tl.store(dbeta + place * DV + columns, of_beta, mask=columns < DV)


@triton.jit
def token_gradients(
    pairs, v, beta, log_weight, shifts, fallback, weight, total, slopes, of_mean, of_free, dpairs, dv, dbeta, time,
    DK: tl.constexpr, DV: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """From the same gradients and y: dpairs (B, H, N, CHUNK, CHUNK), dv (B, T, H, DV) and dbeta (B, H, N, DV) of the
    tokens of the chunk. VALUES: how many value channels at a time."""
    place, of_row, end, heads = chunk_of(time, CHUNK)
    rows = tl.arange(0, CHUNK)
    inside = rows < end
    dtype: tl.constexpr = v.dtype.element_ty
    v += of_row * DV
    shrink = tl.exp(-scale_of(log_weight + state_before(place) * DK, DK, KEYS))
    a = load_tile(pairs + place * CHUNK * CHUNK, rows, rows, CHUNK, CHUNK, CHUNK)
    a = (a.to(tl.float32) * shrink).to(dtype)
    y = tl.load(slopes + of_row + rows * heads, mask=inside, other=0.0)
    of_a = tl.zeros([CHUNK, CHUNK], tl.float32) + y[:, None]
    for start in range(0, DV, VALUES):
        columns = start + tl.arange(0, VALUES)
        rate = None
        if beta is not None:
            rate, anchor = rate_and_anchor(beta + tl.program_id(1) * DV, v, columns, DV)
        g, h, _, _ = _row_operands(
            place, of_row, rows, columns, rate, fallback, weight, total, of_mean, of_free, heads, end, DV, dtype
        )
        v_tile = load_tile(v, rows, columns, heads * DV, end, DV)
        of_a = tl.dot(g, tl.trans(v_tile), of_a, input_precision="ieee")
        of_v = tl.dot(tl.trans(a), g, input_precision="ieee")
        if beta is not None:
            shift = tl.load(shifts + place * DV + columns, mask=columns < DV, other=0.0)
            e = exponentials(v_tile, rate, anchor, shift).to(dtype)
            of_a = tl.dot(h, tl.trans(e), of_a, input_precision="ieee")
            of_e = tl.dot(tl.trans(a), h, input_precision="ieee") * e.to(tl.float32)
            of_v += of_e * (rate * LN_2)[None, :]
            distance = v_tile.to(tl.float32) - (anchor + shift / rate)[None, :]
            of_beta = tl.sum(tl.where(inside[:, None], of_e * distance, 0.0), 0)
            tl.store(dbeta + place * DV + columns, of_beta, mask=columns < DV)
        store_tile(dv + of_row * DV, rows, columns, heads * DV, end, of_v, DV)
    store_tile(dpairs + place * CHUNK * CHUNK, rows, rows, CHUNK, CHUNK, of_a * shrink, CHUNK)
