"""Triton kernels around a kernel of linear attention: [v | e | 1], the read that its sums stand for, their gradients.

    e = exp(beta (f - c))        sums = kernel(q, k, s [v | e | 1])        w = sums_1 / s        s = e^-p
    mean = sums_v / sums_1       F = c + log(R) / beta, R = sums_e / sums_1

In a narrow channel, in which beta f spans less than 2 nats, c is the middle of the values, e is exp(.) - 1 and F is
c + log(1 + R) / beta: R is so small that it loses nothing when it is rounded. s is 1 but for weights beyond e^+-30.
Sums that prove nothing raise the flag of their head: `fem.ops.common.sums` has the rule.

A tile is a block of tokens of one head, or of key channels of one head's memory. The scheme of a head,
(B, H, 3 FREE + 1), holds for each channel c, whether it is narrow and m, the middle of the values, but at most 1 / beta
below the greatest; then p. beta's gradient is a difference of sums of (f - m) e and (F - m): most F are near such an m,
so little is lost where 16 bits round. Of WIDTH columns the first MEAN are v, the next FREE are e, two are 1, the others
0. The gradient of sums_1 is a difference: it has two columns, of which the second one holds what 16 bits round away.
SHARED: each channel reads both, so f is v.
"""

import triton
import triton.language as tl

from fem.ops.common import precision, scan
from fem.ops.common.launch import launched
from fem.ops.common.merge_kernels import LOG_ZERO, NO_WEIGHT
from fem.ops.common.triton_math import (
    LEAST_PROVEN,
    energy,
    exact_softplus,
    level,
    lifted,
    logarithm,
    quotient,
    sigmoid,
    slope_of_beta,
)

LIGHT = tl.constexpr(30.0)  # log-weights up to here need no scale
FORGOTTEN = tl.constexpr(-104.0)  # e^-104 is 0 in float32; more would take digits of the decays, which fla adds up
SMALLEST_BETA, SMALLEST_SPAN = tl.constexpr(precision.SMALLEST_BETA), tl.constexpr(precision.SMALLEST_SPAN)
LEAST_BETA = tl.constexpr(scan.LEAST_BETA)
INFINITE = tl.constexpr(float("inf"))
LEAST_WEIGHT = tl.constexpr(2.0**-126)  # that has a reciprocal in float32


@triton.jit
def place(heads):
    """The head, tile and row of the batch of a program; heads come first, as they lie side by side in memory."""
    return tl.program_id(0) % heads, tl.program_id(0) // heads, tl.program_id(1).to(tl.int64)


@triton.jit
def load_scan_scheme(scheme, beta, cell, head, FREE: tl.constexpr, channel, there):
    """c, whether the channel is narrow, m and beta, a row each; and p."""
    row, at = scheme + cell * (3 * FREE + 1), head * FREE + channel
    shift = tl.load(row + channel, there, other=0.0)
    narrow = tl.load(row + FREE + channel, there, other=1.0) > 0
    middle = tl.load(row + 2 * FREE + channel, there, other=0.0)
    rate = tl.load(beta + at, there, other=1.0)
    return shift[None], narrow[None], middle[None], rate[None], tl.load(row + 3 * FREE)


@launched
def scan_extremes_kernel(
    f, k, theta, beta, extremes, raised, time, part, start, f_batch, f_row, f_head, FREE: tl.constexpr,
    KEY: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The least and greatest f and the greatest k among `part` tokens, (B, H, parts, 2 FREE + KEY). Lowers the flags.
    Where there is a beta to be written, it is softplus(theta + start), 1 without theta."""
    head, step, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    channel, wide = tl.arange(0, COLUMNS), tl.arange(0, WIDE)
    low, high = tl.full((ROWS, COLUMNS), INFINITE, tl.float32), tl.full((ROWS, COLUMNS), -INFINITE, tl.float32)
    most = tl.zeros((ROWS, WIDE), tl.float32)
    for first in range(step * part, min(step * part + part, time), ROWS):
        row = first + tl.arange(0, ROWS)
        token, inside = row.to(tl.int64)[:, None], (row < time)[:, None]
        in_free = inside & (channel < FREE)[None]
        x = tl.load(
            f + batch.to(tl.int64) * f_batch + token * f_row + head * f_head + channel[None], in_free, other=0.0
        )
        low = tl.minimum(low, tl.where(in_free, x.to(tl.float32), INFINITE))
        high = tl.maximum(high, tl.where(in_free, x.to(tl.float32), -INFINITE))
        at = ((batch * time + token) * tl.num_programs(0) + head) * KEY + wide[None]
        most = tl.maximum(most, tl.load(k + at, inside & (wide < KEY)[None], other=0.0).to(tl.float32))
    found = extremes + ((batch * tl.num_programs(0) + head) * tl.num_programs(1) + step) * (2 * FREE + KEY)
    tl.store(found + channel, tl.min(low, 0), channel < FREE)
    tl.store(found + FREE + channel, tl.max(high, 0), channel < FREE)
    tl.store(found + 2 * FREE + wide, tl.max(most, 0), wide < KEY)
    if step == 0:
        tl.store(raised + batch * tl.num_programs(0) + head, 0)
    if beta is not None and step + batch == 0:
        rate = tl.full((COLUMNS,), 1.0, tl.float32)
        if theta is not None:
            x = tl.load(theta + head * FREE + channel, channel < FREE, other=0.0).to(tl.float32)
            rate = tl.maximum(exact_softplus(x + start), LEAST_BETA)
        tl.store(beta + head * FREE + channel, rate, channel < FREE)


@triton.jit
def load_cells(
    log_weight, mean, free, cell, first, KEY: tl.constexpr, FREE: tl.constexpr, CELLS: tl.constexpr, channel
):
    """A block of key channels: which exist, their log-weights and free energies, and which hold anything."""
    row = first + tl.arange(0, CELLS)
    exists = (row < KEY)[:, None]
    weight = tl.load(log_weight + cell * KEY + row[:, None], exists, other=LOG_ZERO)
    known = exists & (channel < FREE)[None]
    kept = tl.load(free + (cell * KEY + row)[:, None] * FREE + channel[None], known, other=0.0)
    return row, exists, weight, kept, known & (weight > NO_WEIGHT)


@launched
def scan_scheme_kernel(
    extremes, beta, log_weight, mean, free, scheme, heaviest, state, raised, parts, MEAN: tl.constexpr,
    FREE: tl.constexpr, KEY: tl.constexpr, WIDTH: tl.constexpr, STATED: tl.constexpr, PRECISE: tl.constexpr,
    COLUMNS: tl.constexpr, WIDE: tl.constexpr, WHOLE: tl.constexpr, CELLS: tl.constexpr,
):  # fmt: skip
    """The scheme; the sums for which a memory stands, (B, H, KEY, WIDTH), where STATED; the most that a key channel
    weighs, (B, H, KEY), 0 where it holds nothing. PRECISE: values that hardly differ raise the flag."""
    head, batch = tl.program_id(0), tl.program_id(1)
    cell = (batch * tl.num_programs(0) + head).to(tl.int64)
    channel, wide, column = tl.arange(0, COLUMNS), tl.arange(0, WIDE), tl.arange(0, WHOLE)
    there, keys = channel < FREE, wide < KEY
    low, high = tl.full((COLUMNS,), INFINITE, tl.float32), tl.full((COLUMNS,), -INFINITE, tl.float32)
    most = tl.zeros((WIDE,), tl.float32)
    for part in range(parts):
        found = extremes + (cell * parts + part) * (2 * FREE + KEY)
        low = tl.minimum(low, tl.load(found + channel, there, other=INFINITE))
        high = tl.maximum(high, tl.load(found + FREE + channel, there, other=-INFINITE))
        most = tl.maximum(most, tl.load(found + 2 * FREE + wide, keys, other=0.0))
    rate = tl.load(beta + head * FREE + channel, there, other=1.0)
    heavy = tl.max(most)
    top = tl.where(heavy > 0, tl.log(tl.where(heavy > 0, heavy, 1.0)), LOG_ZERO)
    if STATED:
        before = tl.load(log_weight + cell * KEY + wide, keys, other=LOG_ZERO)
        top = tl.maximum(top, tl.max(before))
        most = tl.maximum(most, (before > NO_WEIGHT).to(tl.float32))
    scale = tl.where((tl.abs(top) > LIGHT) & (top > NO_WEIGHT), top, 0.0)
    tl.store(heaviest + cell * KEY + wide, most, keys)

    whole = high
    if STATED:
        for first in range(0, KEY, CELLS):
            _row, _exists, weight, kept, held = load_cells(
                log_weight, mean, free, cell, first, KEY, FREE, CELLS, channel
            )
            lead = kept + tl.minimum(weight - scale, 0.0) / rate[None]
            high = tl.maximum(high, tl.max(tl.where(held, lead, -INFINITE), 0))
            whole = tl.maximum(whole, tl.max(tl.where(held, kept, -INFINITE), 0))
            low = tl.minimum(low, tl.min(tl.where(held, kept, INFINITE), 0))
    narrow, middle = (whole - low) * rate < 2.0, tl.maximum(0.5 * low + 0.5 * whole, whole - 1.0 / rate)
    shift = tl.where(narrow, middle, lifted(high, rate))
    to = scheme + cell * (3 * FREE + 1)
    tl.store(to + channel, shift, there)
    tl.store(to + FREE + channel, narrow.to(tl.float32), there)
    tl.store(to + 2 * FREE + channel, middle, there)
    tl.store(to + 3 * FREE, scale)
    if PRECISE and FREE > 0:
        least = tl.min(tl.where(there, rate, INFINITE))
        span = tl.max(tl.where(there, whole, -INFINITE)) - tl.min(tl.where(there, low, INFINITE))
        if (least < SMALLEST_BETA) | (span * least < SMALLEST_SPAN):
            tl.store(raised + cell, 1)
    if STATED:
        for first in range(0, KEY, CELLS):
            row, exists, weight, kept, held = load_cells(log_weight, mean, free, cell, first, KEY, FREE, CELLS, channel)
            relative = weight - scale
            z = tl.where(held, rate[None] * (kept - shift[None]), 0.0)
            e = tl.where(narrow[None], tl.exp(relative) * energy(z, narrow[None]), tl.exp(relative + z))
            into = state + (cell * KEY + row)[:, None] * WIDTH
            v = tl.load(
                mean + (cell * KEY + row)[:, None] * MEAN + column[None], exists & (column < MEAN)[None], other=0
            )
            v = tl.where(((column == MEAN + FREE) | (column == MEAN + FREE + 1))[None], 1.0, v) * tl.exp(relative)
            tl.store(
                into + column[None], v, exists & ((column < MEAN) | ((column >= MEAN + FREE) & (column < WIDTH)))[None]
            )
            tl.store(into + MEAN + channel[None], e, exists & there[None])


@launched
def scan_enter_backward_kernel(
    d_state, scheme, beta, log_weight, mean, free, d_log_weight, d_mean, d_free, d_beta, MEAN: tl.constexpr,
    FREE: tl.constexpr, KEY: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, BROAD: tl.constexpr,
    CELLS: tl.constexpr,
):  # fmt: skip
    """Gradients of a memory from those of the sums for which it stands; d_beta: sum de e (F - m) of the head."""
    head, batch = tl.program_id(0), tl.program_id(1)
    cell = (batch * tl.num_programs(0) + head).to(tl.int64)
    channel, column = tl.arange(0, COLUMNS), tl.arange(0, BROAD)
    there = channel < FREE
    shift, narrow, middle, rate, scale = load_scan_scheme(scheme, beta, cell, head, FREE, channel, there)
    tilt = tl.zeros((CELLS, COLUMNS), tl.float32)
    for first in range(0, KEY, CELLS):
        row, exists, weight, kept, held = load_cells(log_weight, mean, free, cell, first, KEY, FREE, CELLS, channel)
        weight -= scale
        at, in_mean, in_free = (cell * KEY + row)[:, None], exists & (column < MEAN)[None], exists & there[None]
        z = tl.where(held, rate * (kept - shift), 0.0)
        d_e = tl.load(d_state + at * WIDTH + MEAN + channel[None], in_free, other=0.0)
        d_v = tl.load(d_state + at * WIDTH + column[None], in_mean, other=0.0)
        v = tl.load(mean + at * MEAN + column[None], in_mean, other=0.0)
        d_one = tl.load(d_state + at * WIDTH + MEAN + FREE, exists, other=0.0)
        full = tl.exp(weight + z)
        e = tl.where(narrow, tl.exp(weight) * energy(z, narrow), full)
        d_weight = tl.exp(weight) * (tl.sum(d_v * v, 1)[:, None] + d_one) + tl.sum(d_e * e, 1)[:, None]
        tl.store(d_mean + at * MEAN + column[None], tl.exp(weight) * d_v, in_mean)
        tl.store(d_free + at * FREE + channel[None], tl.where(held, rate * d_e * full, 0.0), in_free)
        tl.store(d_log_weight + at, d_weight, exists)
        tilt += tl.where(held, d_e * full * (kept - middle), 0.0)
    tl.store(d_beta + (batch * tl.num_programs(0) + head) * FREE + channel, tl.sum(tilt, 0), there)


@launched
def scan_pack_kernel(
    q, k, g, opens, v, f, beta, scheme, q_out, k_out, g_out, items, time, heads, g_row, v_batch, v_row, v_head, f_batch,
    f_row, f_head, MEAN: tl.constexpr, FREE: tl.constexpr, KEY: tl.constexpr, WIDTH: tl.constexpr, CAST_Q: tl.constexpr,
    CAST_K: tl.constexpr, GIVEN: tl.constexpr, DECAYS: tl.constexpr, LOGITS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, BROAD: tl.constexpr, WIDE: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """s [v | e | 1], 0 behind them; q and k in the items' dtype where they have another; and the DECAYS of each head,
    (B, T, H, DECAYS), which are the GIVEN ones g or, where LOGITS, logsigmoid(g) / 16; one is spread over many. Where
    `opens` (B, T) says that a document opens, the state decays to 0."""
    head, tile, batch = place(heads)
    channel, column, wide, rest = tl.arange(0, COLUMNS), tl.arange(0, BROAD), tl.arange(0, WIDE), tl.arange(0, REST)
    row, cell = tile * ROWS + tl.arange(0, ROWS), batch * heads + head
    token, inside = row.to(tl.int64)[:, None], (row < time)[:, None]
    entry = (batch * time + token) * heads + head
    shift, narrow, _middle, rate, scale = load_scan_scheme(scheme, beta, cell, head, FREE, channel, channel < FREE)
    light = tl.exp(-scale)
    to = items + entry * WIDTH
    in_mean, in_free = inside & (column < MEAN)[None], inside & (channel < FREE)[None]
    x = tl.load(v + batch * v_batch + token * v_row + head * v_head + column[None], in_mean, other=0.0)
    tl.store(to + column[None], x.to(tl.float32) * light, in_mean)
    x = tl.load(f + batch * f_batch + token * f_row + head * f_head + channel[None], in_free, other=0.0)
    z = rate * (x.to(tl.float32) - shift)
    tl.store(to + MEAN + channel[None], light * energy(z, narrow), in_free)
    one = tl.where(rest < 2, light, 0.0)[None] + tl.zeros((ROWS, REST), tl.float32)
    tl.store(to + MEAN + FREE + rest[None], one, inside & (rest < WIDTH - MEAN - FREE)[None])

    keys = inside & (wide < KEY)[None]
    if CAST_Q:
        x = tl.load(q + entry * KEY + wide[None], keys, other=0.0)
        tl.store(q_out + entry * KEY + wide[None], x, keys)
    if CAST_K:
        x = tl.load(k + entry * KEY + wide[None], keys, other=0.0)
        tl.store(k_out + entry * KEY + wide[None], x, keys)
    if DECAYS > 0:
        decay = tl.arange(0, WIDE if DECAYS > 1 else 1)[None]
        there = inside & (decay < DECAYS)
        x = tl.zeros((ROWS, decay.shape[1]), tl.float32)
        if GIVEN > 0:
            at = (batch * time + token) * g_row + head * GIVEN + tl.minimum(decay, GIVEN - 1)
            x = tl.load(g + at, there, other=0.0).to(tl.float32)
        if LOGITS:
            x = exact_softplus(-x) * (-1 / 16)
        if opens is not None:
            first = tl.load(opens + batch * time + token, inside, other=0) != 0
            x += tl.where(first, FORGOTTEN, 0.0)
        tl.store(g_out + entry * DECAYS + decay, x, there)


@triton.jit
def store_decays(to, x, inside, decay, GIVEN: tl.constexpr, DECAYS: tl.constexpr, ADD: tl.constexpr):
    """Store what DECAYS get, summed where a single one was GIVEN; ADD: beside what is there."""
    if GIVEN < DECAYS:
        x, there = tl.sum(x, 1)[:, None], inside
    else:
        to, there = to + decay, inside & (decay < DECAYS)
    if ADD:
        x += tl.load(to, there, other=0.0).to(tl.float32)
    tl.store(to, x, there)


@launched
def scan_pack_backward_kernel(
    d_items, d_decay, g, f, beta, scheme, d_g, d_v, d_f, d_beta, time, heads, g_row, d_g_row, f_batch, f_row, f_head,
    d_v_row, d_v_head, d_f_row, d_f_head, MEAN: tl.constexpr, FREE: tl.constexpr, KEY: tl.constexpr,
    WIDTH: tl.constexpr, SHARED: tl.constexpr, GIVEN: tl.constexpr, DECAYS: tl.constexpr, LOGITS: tl.constexpr,
    SLOPE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BROAD: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """df = beta exp(z) de, which d_v gets beside the mean's gradient where SHARED; of the GIVEN decays or logits, from
    those of the DECAYS. d_beta: of this tile, sum_i exp(z) de (f - m), where SLOPE of theta."""
    head, tile, batch = place(heads)
    channel, column = tl.arange(0, COLUMNS), tl.arange(0, BROAD)
    row, cell = tile * ROWS + tl.arange(0, ROWS), batch * heads + head
    token, inside = row.to(tl.int64)[:, None], (row < time)[:, None]
    token += batch * time
    entry = token * heads + head
    shift, _narrow, middle, rate, scale = load_scan_scheme(scheme, beta, cell, head, FREE, channel, channel < FREE)
    light = tl.exp(-scale)
    in_mean, in_free = inside & (column < MEAN)[None], inside & (channel < FREE)[None]
    x = f + batch * f_batch + (token - batch * time) * f_row + head * f_head + channel[None]
    x = tl.load(x, in_free, other=0.0).to(tl.float32)
    d_e = tl.load(d_items + entry * WIDTH + MEAN + channel[None], in_free, other=0.0).to(tl.float32)
    d_e *= light * tl.exp(tl.where(in_free, rate * (x - shift), 0.0))
    if SHARED:
        mine = tl.load(d_items + entry * WIDTH + channel[None], in_free, other=0.0).to(tl.float32)
        tl.store(d_v + token * d_v_row + head * d_v_head + channel[None], light * mine + rate * d_e, in_free)
    else:
        mine = tl.load(d_items + entry * WIDTH + column[None], in_mean, other=0.0).to(tl.float32)
        tl.store(d_v + token * d_v_row + head * d_v_head + column[None], light * mine, in_mean)
        tl.store(d_f + token * d_f_row + head * d_f_head + channel[None], rate * d_e, in_free)
    if SLOPE:
        d_e *= slope_of_beta(rate)
    tilt = tl.sum(tl.where(in_free, d_e * (x - middle), 0.0), 0)
    tl.store(d_beta + (batch * tl.num_programs(0) + tl.program_id(0)) * FREE + channel, tilt, channel < FREE)
    if DECAYS > 0:
        decay = tl.arange(0, WIDE if DECAYS > 1 else 1)[None]
        there = inside & (decay < DECAYS)
        d_x = tl.load(d_decay + entry * DECAYS + decay, there, other=0.0).to(tl.float32)
        if LOGITS:
            at = token * g_row + head * GIVEN + tl.minimum(decay, GIVEN - 1)
            d_x *= (1 / 16) * sigmoid(-tl.load(g + at, there, other=0.0).to(tl.float32))
        store_decays(d_g + token * d_g_row + head * GIVEN, d_x, inside, decay, GIVEN, DECAYS, False)


@triton.jit
def load_sums(
    sums, weigh, scheme, beta, rows, heads, MEAN: tl.constexpr, FREE: tl.constexpr, KEY: tl.constexpr,
    WIDTH: tl.constexpr, CELLS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BROAD: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """What a tile reads from its sums, everything in doubt or of no weight as 0."""
    head, tile, batch = place(heads)
    channel, column, wide = tl.arange(0, COLUMNS), tl.arange(0, BROAD), tl.arange(0, WIDE)
    row, cell = tile * ROWS + tl.arange(0, ROWS), batch * heads + head
    token, inside = row.to(tl.int64)[:, None], (row < rows)[:, None]
    entry = cell * rows + token if CELLS else (batch * rows + token) * heads + head
    there = channel < FREE
    shift, narrow, middle, rate, scale = load_scan_scheme(scheme, beta, cell, head, FREE, channel, there)
    in_mean, in_free = inside & (column < MEAN)[None], inside & there[None]
    weight = tl.load(sums + entry * WIDTH + MEAN + FREE, inside, other=1.0).to(tl.float32)
    e = tl.load(sums + entry * WIDTH + MEAN + channel[None], in_free, other=1.0).to(tl.float32)
    v = tl.load(sums + entry * WIDTH + column[None], in_mean, other=0.0).to(tl.float32)
    if CELLS:
        floor = tl.full((ROWS, 1), 1.0, tl.float32)
        seen = inside & (tl.load(weigh + entry, inside, other=0.0) > 0)
    else:
        q = tl.load(weigh + entry * KEY + wide[None], inside & (wide < KEY)[None], other=0.0).to(tl.float32)
        floor = tl.sum(q, 1)[:, None]
        seen = floor > 0
    lowest = tl.min(tl.where(narrow | (in_free == 0), INFINITE, e), 1)[:, None]
    proven = (weight >= LEAST_WEIGHT) & (weight >= floor * LEAST_PROVEN) & (weight < INFINITE)
    proven &= lowest >= tl.maximum(weight, floor) * LEAST_PROVEN
    known = seen & proven
    weight = tl.where(known, weight, 1.0)
    light, slow = 1.0 / weight, 1.0 / rate
    ratio = tl.where(known, e * light, tl.where(narrow, 0.0, 1.0))
    lift, base = level(ratio, narrow)
    mean, free_energy = tl.where(known, v * light, 0.0), tl.where(known, shift + lift * slow, 0.0)
    return (
        entry,
        in_mean,
        in_free,
        inside,
        seen & (proven == 0),
        known,
        weight,
        mean,
        free_energy,
        ratio,
        quotient(1.0, base),
        middle,
        rate,
        scale,
    )


@launched
def scan_unpack_kernel(
    sums, weigh, scheme, beta, log_weight, mean, free, raised, doubtful, rows, heads, MEAN: tl.constexpr,
    FREE: tl.constexpr, KEY: tl.constexpr, WIDTH: tl.constexpr, CELLS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, BROAD: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The log-weight, mean and free energy of rows (B, rows, H, WIDTH), or of a memory's CELLS (B, H, rows, WIDTH).

    weigh: of rows the queries, whose sum says how much a row of weight 1 would weigh; of cells what they hold at most.
    doubtful: None, or (B, H, rows), which marks those that prove nothing.
    """
    entry, in_mean, in_free, inside, unproven, known, weight, v, f, _ratio, _slope, _middle, _rate, scale = load_sums(
        sums, weigh, scheme, beta, rows, heads, MEAN, FREE, KEY, WIDTH, CELLS, ROWS, COLUMNS, BROAD, WIDE
    )
    tl.store(log_weight + entry, tl.where(known, logarithm(weight) + scale, LOG_ZERO), inside)
    tl.store(mean + entry * MEAN + tl.arange(0, BROAD)[None], v, in_mean)
    tl.store(free + entry * FREE + tl.arange(0, COLUMNS)[None], f, in_free)
    head, tile, batch = place(heads)
    cell, row = batch * heads + head, tile * ROWS + tl.arange(0, ROWS)
    if doubtful is not None:
        tl.store(doubtful + cell * rows + row[:, None], unproven, inside)
    if tl.max(unproven.to(tl.int32)) > 0:
        tl.store(raised + cell, 1)


@launched
def scan_unpack_backward_kernel(
    sums, weigh, scheme, beta, d_log_weight, d_mean, d_free, d_sums, d_beta, rows, heads, GRADS: tl.constexpr,
    SLOPE: tl.constexpr, MEAN: tl.constexpr, FREE: tl.constexpr, KEY: tl.constexpr, WIDTH: tl.constexpr,
    CELLS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BROAD: tl.constexpr, WIDE: tl.constexpr,
    REST: tl.constexpr,
):  # fmt: skip
    """dsums_v = dmean / sums_1, dsums_e = dF / (beta sums_e), in narrow channels dF / (beta (1 + R) sums_1);
    dsums_1 = (dlog w - sum_j dmean mean - sum_j dsums_e sums_e) / sums_1. d_beta: sum_t dF (m - F) / beta, where
    SLOPE of theta.

    GRADS: 1, 2 and 4, added up: which of d_log_weight, d_mean and d_free there are."""
    entry, in_mean, in_free, inside, _doubtful, known, weight, v, f, ratio, slope, middle, rate, _scale = load_sums(
        sums, weigh, scheme, beta, rows, heads, MEAN, FREE, KEY, WIDTH, CELLS, ROWS, COLUMNS, BROAD, WIDE
    )
    channel, column, rest = tl.arange(0, COLUMNS), tl.arange(0, BROAD), tl.arange(0, REST)
    dtype = d_sums.dtype.element_ty
    d_weight, light, slow = tl.zeros((ROWS, 1), tl.float32), 1.0 / weight, 1.0 / rate
    d_v, d_e = tl.zeros((ROWS, BROAD), tl.float32), tl.zeros((ROWS, COLUMNS), tl.float32)
    if GRADS & 1:
        d_weight += tl.load(d_log_weight + entry, inside & known, other=0.0) * light
    if GRADS & 2:
        d_v = tl.load(d_mean + entry * MEAN + column[None], in_mean & known, other=0.0).to(tl.float32) * light
        d_v = d_v.to(dtype).to(tl.float32)
        d_weight -= tl.sum(d_v * v, 1)[:, None]
    tilt = tl.zeros((ROWS, COLUMNS), tl.float32)
    if GRADS & 4:
        d_f = tl.load(d_free + entry * FREE + channel[None], in_free & known, other=0.0).to(tl.float32) * slow
        d_e = tl.where(in_free & known, d_f * slope * light, 0.0).to(dtype).to(tl.float32)
        d_weight -= tl.sum(tl.where(in_free & known, d_e * ratio, 0.0), 1)[:, None]
        tilt = tl.where(in_free & known, d_f * (middle - f), 0.0)
        if SLOPE:
            tilt *= slope_of_beta(rate)
    to = d_sums + entry * WIDTH
    tl.store(to + column[None], d_v, in_mean)
    tl.store(to + MEAN + channel[None], d_e, in_free)
    rounded = d_weight.to(dtype).to(tl.float32)
    one = tl.where(rest == 0, 1.0, 0.0)[None] * rounded + tl.where(rest == 1, 1.0, 0.0)[None] * (d_weight - rounded)
    tl.store(to + MEAN + FREE + rest[None], one, inside & (rest < WIDTH - MEAN - FREE)[None])
    at = (tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)) * FREE
    tl.store(d_beta + at + channel, tl.sum(tilt, 0), channel < FREE)
