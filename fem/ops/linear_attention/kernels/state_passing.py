"""The state from chunk to chunk: each chunk decays it and adds its own tokens.

    w' = e^g w + x        fresh = log(x / (e^g w))        share = sigmoid(fresh), keep = 1 - share
    mean' = keep mean + share mean_x        F' = (1 / beta) log(keep e^{beta F} + share e^{beta F_x})

Weights are kept as logarithms and values as averages, so that nothing over- or underflows. One program takes a block of
key channels from chunk to chunk.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fem.ops.linear_attention.kernels.tiles import NOTHING, load_tile, store_tile


@triton.jit
def log1p(x):
    """log(1 + x) to the last digit, for 0 <= x <= 1: twice the area hyperbolic tangent of x / (2 + x)."""
    z = x / (2.0 + x)
    square = z * z
    series = tl.full(x.shape, 1.0 / 17, tl.float32)
    for n in tl.static_range(15, 0, -2):
        series = series * square + 1.0 / n
    return 2.0 * z * series


@triton.jit
def log_sigmoid(x):
    return tl.minimum(x, 0.0) - log1p(tl.exp(-tl.abs(x)))


@triton.jit
def add_exp(x, y):
    """log(e^x + e^y)."""
    return tl.maximum(x, y) + log1p(tl.exp(-tl.abs(x - y)))


@triton.jit
def let_through(through, place, keys, DK: tl.constexpr, SHARED: tl.constexpr):
    """The decay of each key channel over a whole chunk, as a logarithm."""
    if through is None:
        passed = tl.zeros(keys.shape, tl.float32)
    elif SHARED:
        passed = tl.zeros(keys.shape, tl.float32) + tl.load(through + place)
    else:
        passed = tl.load(through + place * DK + keys, mask=keys < DK, other=0.0)
    return passed


@triton.jit
def pass_states(
    first_weight, first_mean, first_free, added_weight, added_mean, added_free, through, beta,
    log_weight, mean, free_energy, chunks,
    DK: tl.constexpr, DV: tl.constexpr, VALUES: tl.constexpr, BLOCK: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """first_weight (B, H, DK), first_mean and first_free (B, H, DK, DV); what chunks add, (B, H, N, ...); through
    (B, H, N, DK or 1) or None; beta (H, DV) or None. Out: the state at all boundaries, (B, H, N + 1, ...)."""
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    of_row = batch * tl.num_programs(1) + head
    keys, columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, VALUES)
    weight = tl.load(first_weight + of_row * DK + keys, mask=keys < DK, other=0.0)
    mu = load_tile(first_mean + of_row * DK * DV, keys, columns, DV, DK, DV)
    if beta is not None:
        rate = tl.load(beta + head * DV + columns, mask=columns < DV, other=1.0)[None, :]
        f = load_tile(first_free + of_row * DK * DV, keys, columns, DV, DK, DV)
    for chunk in range(chunks):
        place = of_row * (chunks + 1) + chunk
        tl.store(log_weight + place * DK + keys, weight, mask=keys < DK)
        store_tile(mean + place * DK * DV, keys, columns, DV, DK, mu, DV)
        source = of_row * chunks + chunk
        left = weight + let_through(through, source, keys, DK, SHARED)
        more = tl.load(added_weight + source * DK + keys, mask=keys < DK, other=0.0)
        fresh = (more - left)[:, None]
        weight = tl.maximum(add_exp(left, more), NOTHING)
        mu_added = load_tile(added_mean + source * DK * DV, keys, columns, DV, DK, DV)
        share = tl.sigmoid(fresh)
        mu = tl.where(share < 0.5, mu + share * (mu_added - mu), mu_added - tl.sigmoid(-fresh) * (mu_added - mu))
        if beta is not None:
            store_tile(free_energy + place * DK * DV, keys, columns, DV, DK, f, DV)
            f_added = load_tile(added_free + source * DK * DV, keys, columns, DV, DK, DV)
            base = tl.where(fresh > 0, f_added, f)
            stays, enters = log_sigmoid(-fresh) + rate * (f - base), log_sigmoid(fresh) + rate * (f_added - base)
            f = base + add_exp(stays, enters) / rate
    place = of_row * (chunks + 1) + chunks
    tl.store(log_weight + place * DK + keys, weight, mask=keys < DK)
    store_tile(mean + place * DK * DV, keys, columns, DV, DK, mu, DV)
    if beta is not None:
        store_tile(free_energy + place * DK * DV, keys, columns, DV, DK, f, DV)


@triton.jit
def pass_states_gradients(
    last_weight, last_mean, last_free, of_weight, of_mean, of_free, log_weight, mean, free_energy,
    added_weight, added_mean, added_free, through, beta, dfirst_weight, dfirst_mean, dfirst_free, dthrough, dbeta,
    chunks,
    DK: tl.constexpr, DV: tl.constexpr, VALUES: tl.constexpr, BLOCK: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Gradients last_* arrive at the final state, of_* (B, H, N, ...) at the one that each chunk reads. These become
    the gradients of what the chunks add, in place. Out besides: dfirst_*, dthrough (B, H, N, DK) and dbeta
    (B, H, blocks of key channels, DV)."""
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    of_row = batch * tl.num_programs(1) + head
    keys, columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, VALUES)
    dweight = tl.load(last_weight + of_row * DK + keys, mask=keys < DK, other=0.0)
    dmu = load_tile(last_mean + of_row * DK * DV, keys, columns, DV, DK, DV)
    if beta is not None:
        rate = tl.load(beta + head * DV + columns, mask=columns < DV, other=1.0)[None, :]
        df = load_tile(last_free + of_row * DK * DV, keys, columns, DV, DK, DV)
        of_beta = tl.zeros([VALUES], tl.float32)
    for back in range(chunks):
        chunk = chunks - 1 - back
        place, source = of_row * (chunks + 1) + chunk, of_row * chunks + chunk
        left = tl.load(log_weight + place * DK + keys, mask=keys < DK, other=0.0)
        left += let_through(through, source, keys, DK, SHARED)
        fresh_weight = tl.load(added_weight + source * DK + keys, mask=keys < DK, other=0.0) - left
        fresh = fresh_weight[:, None]
        share, keep = tl.sigmoid(fresh), tl.sigmoid(-fresh)
        before = load_tile(mean + place * DK * DV, keys, columns, DV, DK, DV)
        entering = load_tile(added_mean + source * DK * DV, keys, columns, DV, DK, DV)
        dfresh = tl.sum(dmu * (entering - before) * keep * share, 1)
        dmu_before = load_tile(of_mean + source * DK * DV, keys, columns, DV, DK, DV) + keep * dmu
        store_tile(of_mean + source * DK * DV, keys, columns, DV, DK, share * dmu, DV)
        dmu = dmu_before
        if beta is not None:
            f = load_tile(free_energy + place * DK * DV, keys, columns, DV, DK, DV)
            f_after = load_tile(free_energy + (place + 1) * DK * DV, keys, columns, DV, DK, DV)
            f_added = load_tile(added_free + source * DK * DV, keys, columns, DV, DK, DV)
            gain = fresh + rate * (f_added - f)
            stays, enters = tl.sigmoid(-gain), tl.sigmoid(gain)
            per_nat = df / rate
            dfresh += tl.sum(per_nat * (enters - share), 1)
            of_beta += tl.sum(per_nat * (stays * (f - f_after) + enters * (f_added - f_after)), 0)
            df_before = load_tile(of_free + source * DK * DV, keys, columns, DV, DK, DV) + stays * df
            store_tile(of_free + source * DK * DV, keys, columns, DV, DK, enters * df, DV)
            df = df_before
        passes = tl.sigmoid(-fresh_weight) * dweight - dfresh
        tl.store(dthrough + source * DK + keys, passes, mask=keys < DK)
        of_before = tl.load(of_weight + source * DK + keys, mask=keys < DK, other=0.0)
        tl.store(of_weight + source * DK + keys, tl.sigmoid(fresh_weight) * dweight + dfresh, mask=keys < DK)
        dweight = passes + of_before
    tl.store(dfirst_weight + of_row * DK + keys, dweight, mask=keys < DK)
    store_tile(dfirst_mean + of_row * DK * DV, keys, columns, DV, DK, dmu, DV)
    if beta is not None:
        store_tile(dfirst_free + of_row * DK * DV, keys, columns, DV, DK, df, DV)
        tl.store(dbeta + (of_row * tl.num_programs(0) + tl.program_id(0)) * DV + columns, of_beta, mask=columns < DV)
