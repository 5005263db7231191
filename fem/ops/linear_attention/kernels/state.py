"""What a chunk of tokens adds to the state of each key channel, and its gradient.

    w_c = sum_i kept_ic        mean_cj = sum_i kept_ic v_ij / w_c        R_cj = sum_i kept_ic E_ij
    F_cj = anchor_j + (log2(R_cj / w_c) + shift_j) / rate_j

kept_ic = k_ic exp(sum of the decays after i). With G = dF / beta, g = dmean / w, h = G / R and
y_c = (dlog w_c - sum_j (dmean mean + G)_cj) / w_c,

    dkept_ic = sum_j v_ij g_cj + E_ij h_cj + y_c        dv_ij = sum_c kept_ic (g_cj + beta_j E_ij h_cj)
    dbeta_j = sum_i E_ij (sum_c kept_ic h_cj) (v_ij - u_j) - sum_c G_cj log(R_cj / w_c) / beta_j

with u = anchor + shift / rate. Key channels with w or R < e^-60 are in doubt, and their chunk is computed again by
`fem.ops.linear_attention.fallback`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fem.ops.common.kernels.tiles import LN_2, log2_shifted
from fem.ops.linear_attention.kernels.tiles import (
    PROVEN,
    chunk_of,
    exponentials,
    load_tile,
    log_or_nothing,
    rate_and_anchor,
    store_tile,
)


@triton.jit
def remember(
    k, kept, v, beta, log_weight, mean, free_energy, total, peaks, doubt, time,
    DK: tl.constexpr, DV: tl.constexpr, VALUES: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """k, kept (B, T, H, DK), v (B, T, H, DV), beta (H, DV) or None.

    Out: log_weight and doubt (B, H, N, DK), mean, free_energy and, for a backward, total = R (B, H, N, DK, DV); peaks
    (B, H, N, DV), the greatest value of the chunk's tokens of any weight.
    """
    place, of_row, end, heads = chunk_of(time, CHUNK)
    rows, columns = tl.arange(0, CHUNK), tl.arange(0, VALUES)
    k += of_row * DK
    kept += of_row * DK
    v += of_row * DV
    mean += place * DK * DV
    v_tile = load_tile(v, rows, columns, heads * DV, end, DV)
    if beta is not None:
        there = tl.zeros([CHUNK], tl.float32)
        for start in range(0, DK, BLOCK):
            k_tile = load_tile(k, rows, start + tl.arange(0, BLOCK), heads * DK, end, DK)
            there = tl.maximum(there, tl.max(k_tile.to(tl.float32), 1))
        peak = tl.max(tl.where(there[:, None] > 0, v_tile.to(tl.float32), float("-inf")), 0)
        peak = tl.where(peak > float("-inf"), peak, 0.0)
        tl.store(peaks + place * DV + columns, peak, mask=columns < DV)
        rate, anchor = rate_and_anchor(beta + tl.program_id(1) * DV, v, columns, DV)
        shift = tl.ceil((peak - anchor) * rate)
        e = exponentials(v_tile, rate, anchor, shift).to(v_tile.dtype)
        free_energy += place * DK * DV
    for start in range(0, DK, BLOCK):
        keys = start + tl.arange(0, BLOCK)
        kept_tile = load_tile(kept, rows, keys, heads * DK, end, DK)
        anything = tl.max(load_tile(k, rows, keys, heads * DK, end, DK).to(tl.float32), 0) > 0
        weight = tl.sum(kept_tile.to(tl.float32), 0)
        some = (weight > 0)[:, None]
        over = tl.where(some, weight[:, None], 1.0)
        mu = tl.dot(tl.trans(kept_tile), v_tile, input_precision="ieee") / over
        store_tile(mean, keys, columns, DV, DK, tl.where(some, mu, 0.0), DV)
        lost = weight < PROVEN
        if beta is not None:
            r = tl.dot(tl.trans(kept_tile), e, input_precision="ieee")
            lost |= tl.min(tl.where(columns[None, :] < DV, r, 1.0), 1) < PROVEN
            if total is not None:
                store_tile(total + place * DK * DV, keys, columns, DV, DK, r, DV)
            f = anchor[None, :] + log2_shifted(tl.where(r > 0, r, 1.0) / over, 0.0, shift[None, :]) / rate[None, :]
            store_tile(free_energy, keys, columns, DV, DK, tl.where(some, f, 0.0), DV)
        tl.store(log_weight + place * DK + keys, log_or_nothing(weight), mask=keys < DK)
        tl.store(doubt + place * DK + keys, (lost & anything).to(tl.int8), mask=keys < DK)


@triton.jit
def remember_gradients(
    kept, v, beta, mean, total, peaks, fallback, of_weight, of_mean, of_free, of_v, dkept, dv, dbeta, time,
    DK: tl.constexpr, DV: tl.constexpr, VALUES: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """From the gradients of log_weight, mean and free_energy: dkept (B, T, H, DK) and dbeta (B, H, N, DV); dv, to which
    of_v is added. Nothing passes through chunks that took a fallback (B, H, N). VALUES: how many value channels at a
    time; dkept, a sum over all of them, grows from one to the next."""
    place, of_row, end, heads = chunk_of(time, CHUNK)
    rows = tl.arange(0, CHUNK)
    kept += of_row * DK
    dkept += of_row * DK
    v += of_row * DV
    of_place = place * DK * DV
    ours = tl.load(fallback + place) == 0
    for first in range(0, DV, VALUES):
        columns = first + tl.arange(0, VALUES)
        v_tile = load_tile(v, rows, columns, heads * DV, end, DV)
        of_values = tl.zeros([CHUNK, VALUES], tl.float32)
        if beta is not None:
            peak = tl.load(peaks + place * DV + columns, mask=columns < DV, other=0.0)
            rate, anchor = rate_and_anchor(beta + tl.program_id(1) * DV, v, columns, DV)
            shift = tl.ceil((peak - anchor) * rate)
            e = exponentials(v_tile, rate, anchor, shift).to(v_tile.dtype)
            of_e = tl.zeros([CHUNK, VALUES], tl.float32)
            of_beta = tl.zeros([VALUES], tl.float32)
        for start in range(0, DK, BLOCK):
            keys = start + tl.arange(0, BLOCK)
            kept_tile = load_tile(kept, rows, keys, heads * DK, end, DK)
            weight = tl.sum(kept_tile.to(tl.float32), 0)
            sure = ours & (weight >= PROVEN)
            over = 1.0 / tl.where(sure, weight, float("inf"))
            g = load_tile(of_mean + of_place, keys, columns, DV, DK, DV)
            mu = load_tile(mean + of_place, keys, columns, DV, DK, DV)
            g = (g * over[:, None]).to(v_tile.dtype)
            y = -tl.sum(g.to(tl.float32) * mu, 1)
            if first == 0:
                y += tl.load(of_weight + place * DK + keys, mask=keys < DK, other=0.0) * over
            of_kept = tl.dot(v_tile, tl.trans(g), input_precision="ieee")
            of_values = tl.dot(kept_tile, g, of_values, input_precision="ieee")
            if beta is not None:
                r = load_tile(total + of_place, keys, columns, DV, DK, DV)
                proven = sure[:, None] & (r >= PROVEN)
                per_nat = load_tile(of_free + of_place, keys, columns, DV, DK, DV) / (rate * LN_2)[None, :]
                r = tl.where(proven, r, 1.0)
                h = tl.where(proven, per_nat / r, 0.0).to(v_tile.dtype)
                per_nat = h.to(tl.float32) * r
                y -= tl.sum(per_nat, 1) * over
                of_beta -= tl.sum(tl.where(proven, per_nat * tl.log2(r * over[:, None]), 0.0), 0) / rate
                of_kept = tl.dot(e, tl.trans(h), of_kept, input_precision="ieee")
                of_e = tl.dot(kept_tile, h, of_e, input_precision="ieee")
            of_kept += y[None, :]
            if first > 0:
                of_kept += load_tile(dkept, rows, keys, heads * DK, end, DK)
            store_tile(dkept, rows, keys, heads * DK, end, of_kept, DK)
        if beta is not None:
            posterior = of_e * e.to(tl.float32)
            of_values += posterior * (rate * LN_2)[None, :]
            distance = v_tile.to(tl.float32) - (anchor + shift / rate)[None, :]
            of_beta += tl.sum(tl.where(rows[:, None] < end, posterior * distance, 0.0), 0)
            tl.store(dbeta + place * DV + columns, of_beta, mask=columns < DV)
        of_values += load_tile(of_v + of_row * DV, rows, columns, heads * DV, end, DV)
        store_tile(dv + of_row * DV, rows, columns, heads * DV, end, of_values, DV)
        tl.debug_barrier()  # the next round adds to dkept, which other threads have stored
