"""Triton kernels that read those tokens of linear attention which its sums do not prove, from the definition.

    s_ti = sum_c s_tic                        s_tic = q_tc k_ic a_tic       a_tic = e^{g_{i+1} + .. + g_t}
    p_ti = s_ti / sum_i s_ti                  w_ti = p_ti e^{beta (f_i - F_t)}
    mean_t = sum_i p_ti v_i                   F_t = log(sum_i p_ti e^{beta f_i}) / beta
    d_ti = dlog s_ti = sum_j p_ti (v_ij - mean_tj) dmean_tj + sum_j (w_tij - p_ti) dF_tj / beta_j
    dq_tc = sum_i d_ti k_ic a_tic / s_ti      dk_ic = sum_t d_ti q_tc a_tic / s_ti
    dv_i = sum_t p_ti dmean_t                 df_i = sum_t w_ti dF_t
    dg_rc = sum_{t >= r > i} d_ti s_tic / s_ti = sum_{t >= r} q_tc dq_tc - sum_{i >= r} k_ic dk_ic

They go token by token over blocks of keys, in float32. They are launched in every call, and a program ends at once
where raised (B, H) is 0; doubtful (B, H, T) marks the tokens. g (B, T, H, DECAYS): the decay into each token, None
without one; opens (B, T): where a document begins, which forgets everything before. DECAYS is KEY, or 1: all channels
decay alike, and the first sum of dg, over c too, is 0, as sum_i d_ti is. exact (B, T, H, FREE + 2), for the backward:
F, the logarithm of sum_i s_ti, and sum_j mean_tj dmean_tj.
"""

import triton
import triton.language as tl

from fem.ops.common.launch import launched
from fem.ops.common.merge_kernels import LOG_ZERO, NO_WEIGHT, expm1, log1p, log_or_zero, share_apart
from fem.ops.common.triton_math import slope_of_beta
from fem.ops.linear_attention.scan_kernels import load_scan_scheme, store_decays


@triton.jit
def fall_into(g, opens, token, entry, there, DECAYS: tl.constexpr, decay):
    """The decays into tokens, a row each, which stand at `token` of the batch and `entry` of its heads; 0 where none is
    there."""
    there, fall = there[:, None], tl.zeros((token.shape[0], decay.shape[0]), tl.float32)
    if g is not None:
        fall = tl.load(g + entry[:, None] * DECAYS + decay[None], there & (decay < DECAYS)[None], other=0.0)
    if opens is not None:
        fall = tl.where(tl.load(opens + token[:, None], there, other=0) != 0, LOG_ZERO, fall)
    return fall


@triton.jit
def scores(query, keys, fallen):
    """log s of keys whose channels have decayed by `fallen`; and a and s, both over the greatest a of the key."""
    known = keys * query[None] > 0.0
    peak = tl.maximum(tl.max(tl.where(known, fallen, LOG_ZERO), 1), LOG_ZERO)[:, None]
    a = tl.exp(tl.minimum(fallen - peak, 0.0))
    s = tl.sum(keys * a * query[None], 1)
    log_s = tl.maximum(log_or_zero(s) + tl.sum(peak, 1), LOG_ZERO)
    return log_s, a, tl.where(log_s > NO_WEIGHT, s, 1.0)


@triton.jit
def load_columns(x, token, row, head_at, width, channel, there):
    """Rows of a head, whose tokens are `row` numbers apart."""
    at = x + token[:, None] * row + head_at + channel[None]
    return tl.load(at, there[:, None] & (channel < width)[None], other=0.0).to(tl.float32)


@triton.jit
def scores_of_keys(
    query, k, g, opens, start, t, carried, row, head, heads, KEY: tl.constexpr, KEYS: tl.constexpr,
    DECAYS: tl.constexpr, wide, decay,
):  # fmt: skip
    """log s of token t over the KEYS keys from `start` on, and k a / s; and the decay from the first of them to t, of
    which `carried` is what comes after the last."""
    key = start + tl.arange(0, KEYS)
    entry = (row + key) * heads + head
    keys = load_columns(k, entry, KEY, 0, KEY, wide, key <= t)
    fall = fall_into(g, opens, row + key + 1, entry + heads, key < t, DECAYS, decay)
    if DECAYS == 1:  # Triton 3.6 fails at a scan of one column
        later = tl.sum(tl.where(key[:, None] <= key[None], tl.trans(fall), 0.0), 1)[:, None]
    else:
        later = tl.cumsum(fall, 0, reverse=True)
    log_s, a, s = scores(query, keys, carried + later)
    return log_s, keys * a / s[:, None], carried + tl.sum(fall, 0)[None]


@triton.jit
def values_of_keys(v, f, v_row, f_row, v_at, f_at, key, seen, MEAN: tl.constexpr, FREE: tl.constexpr, column, channel):
    """v and f of a block of keys."""
    return load_columns(v, key, v_row, v_at, MEAN, column, seen), load_columns(f, key, f_row, f_at, FREE, channel, seen)


@triton.jit
def load_query(q, entry, KEY: tl.constexpr, wide):
    return tl.load(q + entry * KEY + wide, wide < KEY, other=0.0).to(tl.float32)


@triton.jit
def with_more_keys(top, total, mean, tops, sums, log_s, value, energy, shift, narrow, rate):
    """The greatest log s with sums of s and s v over it, and the greatest of log s + beta (f - shift) with sums of its
    exponentials over that, of a block of keys more."""
    seen, peak = log_s > NO_WEIGHT, tl.maximum(top, tl.max(log_s, 0))
    s = tl.where(seen, tl.exp(log_s - peak), 0.0)
    total = total * tl.exp(top - peak) + tl.sum(s, 0)
    mean = mean * tl.exp(top - peak) + tl.sum(s[:, None] * value, 0)
    z = rate * (energy - shift)
    height = log_s[:, None] + tl.where(narrow, 0.0, z)
    peaks = tl.maximum(tops, tl.max(height, 0))
    e = tl.exp(height - peaks[None]) * tl.where(narrow, expm1(tl.where(narrow, z, 0.0)), 1.0)
    sums = sums * tl.exp(tops - peaks) + tl.sum(tl.where(seen[:, None], e, 0.0), 0)
    return peak, total, mean, peaks, sums


@triton.jit
def read_of_query(
    query, k, g, opens, v, f, shift, narrow, rate, t, row, head, heads, v_row, f_row, v_at, f_at,
    MEAN: tl.constexpr, FREE: tl.constexpr, KEY: tl.constexpr, KEYS: tl.constexpr, DECAYS: tl.constexpr, wide, column,
    channel, decay, old_weight, old_mean, old_free,
):  # fmt: skip
    """log sum_i s_ti, mean and F of a query at token t; LOG_ZERO and 0 where it weighs nothing. Key channels whose old
    read is given are keys before the first, of one channel each."""
    total, carried, start = 0.0, tl.zeros((1, decay.shape[0]), tl.float32), t // KEYS * KEYS
    mean, sums = tl.zeros(column.shape, tl.float32), tl.zeros(channel.shape, tl.float32)
    top, tops = tl.full((), LOG_ZERO, tl.float32), sums + LOG_ZERO
    while start >= 0:
        log_s, _reached, carried = scores_of_keys(
            query, k, g, opens, start, t, carried, row, head, heads, KEY, KEYS, DECAYS, wide, decay
        )
        key, seen = start + tl.arange(0, KEYS), log_s > NO_WEIGHT
        value, energy = values_of_keys(v, f, v_row, f_row, v_at, f_at, key, seen, MEAN, FREE, column, channel)
        top, total, mean, tops, sums = with_more_keys(
            top, total, mean, tops, sums, log_s, value, energy, shift, narrow, rate
        )
        start = tl.where(tl.max(carried) > NO_WEIGHT, start - KEYS, -1)
    if old_weight is not None:
        token = row + tl.arange(0, 1)
        carried += fall_into(g, opens, token, token * heads + head, token >= 0, DECAYS, decay)
        for first in range(0, KEY, KEYS):
            held = first + tl.arange(0, KEYS)
            there, own = held < KEY, held[:, None] == wide[None]
            if DECAYS == 1:
                fallen = tl.sum(carried)
            else:
                fallen = tl.sum(tl.where(own, carried, 0.0), 1)
            log_s = log_or_zero(tl.sum(tl.where(own, query[None], 0.0), 1)) + fallen
            log_s = tl.maximum(log_s + tl.load(old_weight + held, there, other=LOG_ZERO), LOG_ZERO)
            value = load_columns(old_mean, held, MEAN, 0, MEAN, column, there)
            energy = load_columns(old_free, held, FREE, 0, FREE, channel, there)
            top, total, mean, tops, sums = with_more_keys(
                top, total, mean, tops, sums, log_s, value, energy, shift, narrow, rate
            )
    known = total > 0.0
    total = tl.where(known, total, 1.0)
    ratio = sums[None] / total
    lift = tl.where(narrow, log1p(tl.where(narrow, ratio, 0.0)), log_or_zero(ratio) + (tops - top)[None])
    free = tl.sum(shift + lift / rate, 0)
    return top + tl.log(total), tl.where(known, mean / total, 0.0), tl.where(known, free, 0.0)


@triton.jit
def through_scores(log_s, log_z, value, energy, mean_slope, free, d_mean, d_free, rate):
    """p and w of a token over a block of keys, and d; mean_slope: sum_j mean_j dmean_j."""
    log_p = tl.where(log_s > NO_WEIGHT, log_s - log_z, LOG_ZERO)
    p, above = tl.exp(log_p), rate * (energy - free[None])
    d = p * (tl.sum(value * d_mean[None], 1) - mean_slope)
    d += tl.sum(share_apart(log_p[:, None], above) * (d_free[None] / rate), 1)
    return p, tl.exp(log_p[:, None] + above), d


@launched
def doubtful_kernel(
    q, k, g, opens, v, f, scheme, beta, raised, doubtful, log_weight, mean, free, old_weight, old_mean, old_free, time,
    heads, v_batch, v_row, v_head, f_batch, f_row, f_head, CELLS: tl.constexpr, MEAN: tl.constexpr, FREE: tl.constexpr,
    KEY: tl.constexpr, KEYS: tl.constexpr, DECAYS: tl.constexpr, COLUMNS: tl.constexpr, BROAD: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Write log_weight, which is log sum_i s_ti, the mean and F of the marked tokens: a program has every so many
    tokens of a head. old_weight, old_mean, old_free (B, H, KEY, _): what key channels held before.

    CELLS: of the marked key channels (B, H, KEY) instead, what they have kept in the end: the read of a query that is 1
    there.
    """
    decay = tl.arange(0, WIDE if DECAYS > 1 else 1)
    head, batch = tl.program_id(0), tl.program_id(2).to(tl.int64)
    cell = batch * heads + head
    if tl.load(raised + cell) != 0:
        channel, column, wide, row = tl.arange(0, COLUMNS), tl.arange(0, BROAD), tl.arange(0, WIDE), batch * time
        shift, narrow, _, rate, _ = load_scan_scheme(scheme, beta, cell, head, FREE, channel, channel < FREE)
        if old_weight is not None:
            old_weight += cell * KEY
            old_mean += cell * KEY * MEAN
            old_free += cell * KEY * FREE
        count = KEY if CELLS else time
        for n in range(tl.program_id(1), count, tl.num_programs(1)):
            if tl.load(doubtful + cell * count + n) != 0:
                if CELLS:
                    entry, t, query = cell * KEY + n, time - 1, tl.where(wide == n, 1.0, 0.0)
                else:
                    entry, t = (row + n) * heads + head, n
                    query = load_query(q, entry, KEY, wide)
                log_z, value, energy = read_of_query(
                    query, k, g, opens, v + batch * v_batch, f + batch * f_batch, shift, narrow, rate, t, row, head,
                    heads, v_row, f_row, head * v_head, head * f_head, MEAN, FREE, KEY, KEYS, DECAYS, wide, column,
                    channel, decay, old_weight, old_mean, old_free,
                )  # fmt: skip
                tl.store(log_weight + entry, log_z)
                tl.store(mean + entry * MEAN + column, value, column < MEAN)
                tl.store(free + entry * FREE + channel, energy, channel < FREE)


@launched
def doubtful_tokens_backward_kernel(
    q, k, g, opens, v, f, scheme, beta, raised, doubtful, d_mean, d_free, exact, d_q, rises, d_theta, tiles, time,
    heads, v_batch, v_row, v_head, f_batch, f_row, f_head, MEAN: tl.constexpr, FREE: tl.constexpr, KEY: tl.constexpr,
    KEYS: tl.constexpr, DECAYS: tl.constexpr, COLUMNS: tl.constexpr, BROAD: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Write dq and `exact` of the marked tokens, and q dq to `rises` (B, H, T, DECAYS) where channels have decays of
    their own; add to d_theta (B tiles, H, FREE) what they give it."""
    decay = tl.arange(0, WIDE if DECAYS > 1 else 1)
    head, batch = tl.program_id(0), tl.program_id(2).to(tl.int64)
    cell = batch * heads + head
    if tl.load(raised + cell) != 0:
        channel, column, wide, row = tl.arange(0, COLUMNS), tl.arange(0, BROAD), tl.arange(0, WIDE), batch * time
        there = channel < FREE
        shift, narrow, _, rate, _ = load_scan_scheme(scheme, beta, cell, head, FREE, channel, there)
        v += batch * v_batch
        f += batch * f_batch
        tilt = tl.zeros((KEYS, COLUMNS), tl.float32)
        for t in range(tl.program_id(1), time, tl.num_programs(1)):
            if tl.load(doubtful + cell * time + t) != 0:
                entry = (row + t) * heads + head
                query = load_query(q, entry, KEY, wide)
                log_z, mean, free = read_of_query(
                    query, k, g, opens, v, f, shift, narrow, rate, t, row, head, heads, v_row, f_row, head * v_head,
                    head * f_head, MEAN, FREE, KEY, KEYS, DECAYS, wide, column, channel, decay, None, None, None,
                )  # fmt: skip
                of_mean = tl.load(d_mean + entry * MEAN + column, column < MEAN, other=0.0).to(tl.float32)
                of_free = tl.load(d_free + entry * FREE + channel, there, other=0.0).to(tl.float32)
                mean_slope, to = tl.sum(mean * of_mean, 0), exact + entry * (FREE + 2)
                tl.store(to + channel, free, there)
                tl.store(to + FREE, log_z)
                tl.store(to + FREE + 1, mean_slope)
                found, start = tl.zeros(wide.shape, tl.float32), t // KEYS * KEYS
                carried = tl.zeros((1, decay.shape[0]), tl.float32)
                while start >= 0:
                    log_s, reached, carried = scores_of_keys(
                        query, k, g, opens, start, t, carried, row, head, heads, KEY, KEYS, DECAYS, wide, decay
                    )
                    key, seen = start + tl.arange(0, KEYS), log_s > NO_WEIGHT
                    value, energy = values_of_keys(
                        v, f, v_row, f_row, head * v_head, head * f_head, key, seen, MEAN, FREE, column, channel
                    )
                    _share, w, d = through_scores(log_s, log_z, value, energy, mean_slope, free, of_mean, of_free, rate)
                    found += tl.sum(d[:, None] * reached, 0)
                    tilt += w * (energy - free[None]) * (of_free[None] / rate)
                    start = tl.where(tl.max(carried) > NO_WEIGHT, start - KEYS, -1)
                tl.store(d_q + entry * KEY + wide, found, wide < KEY)
                if DECAYS > 1:
                    tl.store(rises + (cell * time + t) * DECAYS + wide, query * found, wide < KEY)
        to = d_theta + ((batch * tiles + tl.program_id(1)) * heads + head) * FREE + channel
        found = tl.sum(tilt * slope_of_beta(rate), 0)
        tl.store(to, tl.load(to, there, other=0.0) + found, there)


@triton.jit
def token_of_keys(
    q, d_mean, d_free, exact, t, entry, key, keys, value, energy, fallen, rate, MEAN: tl.constexpr, FREE: tl.constexpr,
    KEY: tl.constexpr, wide, column, channel,
):  # fmt: skip
    """A marked token, for keys from which on the decay is `fallen`: its dmean and dF; q a / s, p, w and d."""
    query = load_query(q, entry, KEY, wide)
    of_mean = tl.load(d_mean + entry * MEAN + column, column < MEAN, other=0.0).to(tl.float32)
    of_free = tl.load(d_free + entry * FREE + channel, channel < FREE, other=0.0).to(tl.float32)
    known = exact + entry * (FREE + 2)
    free = tl.load(known + channel, channel < FREE, other=0.0)
    log_s, a, s = scores(query, tl.where((key <= t)[:, None], keys, 0.0), fallen)
    p, w, d = through_scores(
        log_s, tl.load(known + FREE), value, energy, tl.load(known + FREE + 1), free, of_mean, of_free, rate
    )
    return of_mean, of_free, query[None] * a / s[:, None], p, w, d


@launched
def doubtful_items_backward_kernel(
    q, k, g, opens, v, f, beta, raised, doubtful, d_mean, d_free, exact, d_k, d_v, d_f, rises, time, heads, v_batch,
    v_row, v_head, f_batch, f_row, f_head, d_v_row, d_v_head, d_f_row, d_f_head, MEAN: tl.constexpr,
    FREE: tl.constexpr, KEY: tl.constexpr, SHARED: tl.constexpr, KEYS: tl.constexpr, SPAN: tl.constexpr,
    DECAYS: tl.constexpr, COLUMNS: tl.constexpr, BROAD: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Add dk, dv and df of all keys, and take k dk from `rises`, which has q dq of the marked tokens. A program has
    every so many blocks of keys, and visits the tokens from these on; behind the block SPAN at a time that have no
    mark."""
    decay = tl.arange(0, WIDE if DECAYS > 1 else 1)
    head, batch = tl.program_id(0), tl.program_id(2).to(tl.int64)
    cell = batch * heads + head
    if tl.load(raised + cell) != 0:
        channel, column, wide, row = tl.arange(0, COLUMNS), tl.arange(0, BROAD), tl.arange(0, WIDE), batch * time
        in_free = channel < FREE
        rate = tl.load(beta + head * FREE + channel, in_free, other=1.0)[None]
        for block in range(tl.program_id(1), tl.cdiv(time, KEYS), tl.num_programs(1)):
            key = block * KEYS + tl.arange(0, KEYS)
            inside = key < time
            keys = load_columns(k, (row + key) * heads + head, KEY, 0, KEY, wide, inside)
            value, energy = values_of_keys(
                v + batch * v_batch, f + batch * f_batch, v_row, f_row, head * v_head, head * f_head, key, inside,
                MEAN, FREE, column, channel,
            )  # fmt: skip
            k_sum, v_sum = tl.zeros((KEYS, WIDE), tl.float32), tl.zeros((KEYS, BROAD), tl.float32)
            f_sum = tl.zeros((KEYS, COLUMNS), tl.float32)
            fallen = tl.zeros((KEYS, decay.shape[0]), tl.float32)  # the decay from each key on
            for start in range(block * KEYS, time, SPAN):
                token = start + tl.arange(0, SPAN)
                there, marks = token < time, doubtful + cell * time + token
                if tl.max(fallen) > NO_WEIGHT:
                    unmarked = tl.max(tl.load(marks, there, other=0).to(tl.int32), 0) == 0
                    if unmarked & (start >= block * KEYS + KEYS):
                        fall = fall_into(g, opens, row + token, (row + token) * heads + head, there, DECAYS, decay)
                        fallen += tl.sum(fall) if DECAYS == 1 else tl.sum(fall, 0)[None]
                    else:
                        for t in range(start, min(start + SPAN, time)):
                            entry = (row + t) * heads + head
                            fallen += fall_into(g, opens, row + t + 0 * key, entry + 0 * key, key < t, DECAYS, decay)
                            if tl.load(doubtful + cell * time + t) != 0:
                                of_mean, of_free, reach, p, w, d = token_of_keys(
                                    q, d_mean, d_free, exact, t, entry, key, keys, value, energy, fallen, rate, MEAN,
                                    FREE, KEY, wide, column, channel,
                                )  # fmt: skip
                                k_sum += d[:, None] * reach
                                v_sum += p[:, None] * of_mean[None]
                                f_sum += w * of_free[None]
            token, here = (row + key)[:, None], inside[:, None]
            to, exists = d_k + (token * heads + head) * KEY + wide[None], here & (wide < KEY)[None]
            tl.store(to, tl.load(to, exists, other=0.0).to(tl.float32) + k_sum, exists)
            to, exists = d_v + token * d_v_row + head * d_v_head + column[None], here & (column < MEAN)[None]
            if SHARED:
                v_sum += f_sum
            tl.store(to, tl.load(to, exists, other=0.0).to(tl.float32) + v_sum, exists)
            if not SHARED:
                to, exists = d_f + token * d_f_row + head * d_f_head + channel[None], here & in_free[None]
                tl.store(to, tl.load(to, exists, other=0.0).to(tl.float32) + f_sum, exists)
            to, rise = rises + (cell * time + key)[:, None] * DECAYS + decay[None], keys * k_sum
            exists = here & (decay < DECAYS)[None]
            if DECAYS > 1:
                marked = tl.load(doubtful + cell * time + key[:, None], here, other=0) != 0
                tl.store(to, tl.load(to, exists & marked, other=0.0) - rise, exists)
            else:
                tl.store(to, -tl.sum(rise, 1)[:, None], exists)


@launched
def doubtful_decays_backward_kernel(
    rises, raised, logits, d_logits, time, heads, row, d_row, GIVEN: tl.constexpr, DECAYS: tl.constexpr,
    BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Add the gradient of the GIVEN logits of g = logsigmoid(logit) / 16, from the last token to the first."""
    decay = tl.arange(0, WIDE if DECAYS > 1 else 1)[None]
    head, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    cell, later = batch * heads + head, tl.zeros((1, decay.shape[1]), tl.float32)
    if tl.load(raised + cell) != 0:
        for block in range(tl.cdiv(time, BLOCK)):
            t = (time - (block + 1) * BLOCK + tl.arange(0, BLOCK))[:, None]
            inside, token = t >= 0, batch * time + t
            there = inside & (decay < DECAYS)
            found = tl.load(rises + (cell * time + t) * DECAYS + decay, there, other=0.0)
            at = head * GIVEN + tl.minimum(decay, GIVEN - 1)
            slope = (1 / 16) * tl.sigmoid(-tl.load(logits + token * row + at, there, other=0.0).to(tl.float32))
            slope *= later + tl.cumsum(found, 0, reverse=True)
            later += tl.sum(found, 0)[None]
            store_decays(d_logits + token * d_row + head * GIVEN, slope, inside, decay, GIVEN, DECAYS, True)
