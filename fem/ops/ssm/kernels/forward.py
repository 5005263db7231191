"""The forward of the state space scan: N states per channel, each a pair of streams as in the channel scan.

    state_n: S, E of x_n = log(delta_t B_tn) and a_n = delta_t A_n        y = sum_n C_n S_n(1) + D        L = log y
    mean = (sum_n C_n S_n(v) + D v) / y        F = (1 / beta) log((sum_n C_n E_n + D e^{beta v}) / y)

A program takes the states of BLOCK channels over one chunk of tokens. delta, v are (B, T, D), A (N, D), B and C
(B, T, N), skip = D and beta (D), opens (B, T); states (6 or 3, B, .., N D). Without the skip a token does not read
itself, only what stood before it. Where log_delta is given, B and C are logarithms too: delta itself then only decays.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fem.ops.channel_scan.kernels.forward import load_three, part_at, store_three
from fem.ops.common.kernels.channel_states import add_energy, add_weights, at_least_half, lowered
from fem.ops.common.kernels.decay_steps import chunk_of, decayed, load_channels
from fem.ops.common.kernels.tiles import NEARLY_NOTHING, NOTHING

LARGEST = tl.constexpr(50.0)  # a greater exponent belongs to a factor 0, whose derivative would reach no sum


@triton.jit
def states_of(columns, channels, N: tl.constexpr, PADDED: tl.constexpr):
    """Offsets of the states of each channel, which of them exist, (BLOCK, PADDED); n, and n < N, (1, PADDED)."""
    n = tl.arange(0, PADDED)[None, :]
    return n * channels + columns[:, None], (columns < channels)[:, None] & (n < N), n, n < N


@triton.jit
def load_weights(states, place, size, inside):
    peak, total, weighted = load_three(states, place, size, inside)
    return tl.where(inside, peak, NOTHING), tl.where(inside, total, 1.0), weighted


@triton.jit
def load_energy(states, place, size, inside):
    peak, at, energy = load_three(states, place, size, inside)
    return tl.where(inside, peak, NOTHING), at, tl.where(inside, energy, 1.0)


@triton.jit
def load_log(at, log_delta, exists):
    """log of what is loaded, which is a logarithm already where log_delta is given; -inf outside."""
    if log_delta is None:
        log = tl.log(load_channels(at, exists))
    else:
        log = tl.load(at, mask=exists, other=float("-inf"))
    return log


@triton.jit
def entry(delta, log_delta, a, b, opens, place, token, inside, n, exists, N: tl.constexpr):
    """delta (BLOCK, 1), log-decay and log-weight (BLOCK, PADDED) of one token."""
    rate = load_channels(delta + place, inside)[:, None]
    log_decay = rate * a
    if opens is not None:
        log_decay = tl.where(tl.load(opens + token) != 0, float("-inf"), log_decay)
    if log_delta is None:
        log_rate = tl.log(rate)
    else:
        log_rate = load_log(log_delta + place, log_delta, inside)[:, None]
    return rate, log_decay, log_rate + load_log(b + token * N + n, log_delta, exists)


@triton.jit
def of_positive(log_weight, part):
    """The part of a weight; 0 where the weight is 0, as the part given is then that of one unit of weight."""
    return tl.where(log_weight > float("-inf"), part, 0.0)


@triton.jit
def look(exponent, sums, log_c, own_exponent, skip):
    """sum_n C_n sums_n e^exponent_n + skip e^own_exponent as y e^top, and what part of it each term is.

    Where C_n or skip is 0, what part one unit of it would be.
    """
    log_skip = own_exponent
    top = tl.maximum(tl.max(exponent + log_c, 1), NOTHING)
    if skip is not None:
        log_skip = tl.log(skip)
        top = tl.maximum(top, own_exponent + log_skip)
    weight = tl.exp(tl.minimum(of_positive(log_c, log_c) + (exponent - top[:, None]), LARGEST)) * sums
    y = tl.sum(of_positive(log_c, weight), 1)
    own = y
    if skip is not None:
        own = tl.exp(tl.minimum(of_positive(log_skip, log_skip) + (own_exponent - top), LARGEST))
        y += of_positive(log_skip, own)
    seen = top > NEARLY_NOTHING
    per = tl.where(seen, 1.0 / tl.where(seen, y, 1.0), 0.0)
    return top, tl.where(seen, y, 1.0), weight * per[:, None], own * per


@triton.jit
def measured(peak, at, steep, value, skip):
    """The highest value c of a token's states, and the exponents of their energies and of the token's own, less c."""
    some = peak > NEARLY_NOTHING
    r = tl.max(tl.where(some, at, NOTHING), 1)
    if skip is not None:
        r = tl.maximum(r, value)
    r = tl.where(r > NEARLY_NOTHING, r, 0.0)
    return r, tl.where(some, peak + steep[:, None] * (at - r[:, None]), NOTHING), steep * (value - r)


@triton.jit
def faded(peak, total, weighted, log_decay):
    peak, total, stays, factor, scale = lowered(peak, total, log_decay)
    return peak, total, decayed(weighted, stays, factor) * scale


@triton.jit
def per_unit(exponent, sums, peak):
    """The share that one unit of input would have in a sum; 0 for empty states."""
    return tl.where(peak > NEARLY_NOTHING, tl.exp(tl.minimum(exponent, LARGEST)) / sums, 0.0)


@triton.jit
def visit(peak, total, weighted, top, at, energy, log_decay, x, log_c, value, steep, skip):
    """One token: the states after it, L and F of its read, the average of every state that it reads; then its shares in
    the states (of one unit, where x = -inf), the states' parts in the read and its own, the three for the energies too.

    Without the skip it reads the states before it, decayed; without a temperature the latter three are the former.
    """
    none = x == float("-inf")
    peak, total, weighted = faded(peak, total, weighted, log_decay)
    seen, seen_total, seen_weighted = peak, total, weighted
    peak, total, weighted, share = add_weights(peak, total, weighted, None, x, 1.0, value[:, None])
    if skip is not None:
        seen, seen_total, seen_weighted = peak, total, weighted
    highest, y, part, own = look(seen, seen_total, log_c, tl.zeros_like(value), skip)
    share = tl.where(none, per_unit(-peak, total, peak), share)
    free, energy_share, energy_part, energy_own = y, share, part, own
    if steep is not None:
        top, energy, _stays, _factor, _scale = lowered(top, energy, log_decay)
        seen, seen_at, seen_energy = top, at, energy
        top, at, energy, energy_share = add_energy(top, at, energy, None, steep[:, None], x, value[:, None], 1.0)
        if skip is not None:
            seen, seen_at, seen_energy = top, at, energy
        r, exponent, own_exponent = measured(seen, seen_at, steep, value, skip)
        higher, z, energy_part, energy_own = look(exponent, seen_energy, log_c, own_exponent, skip)
        free = tl.where(highest > NEARLY_NOTHING, r + (tl.log(z / y) + (higher - highest)) / steep, 0.0)
        single = per_unit(steep[:, None] * (value[:, None] - at) - top, energy, top)
        energy_share = tl.where(none, single, energy_share)
    return (
        peak, total, weighted, top, at, energy, highest + tl.log(y), free, seen_weighted / seen_total,
        share, part, own, energy_share, energy_part, energy_own,
    )  # fmt: skip


@triton.jit
def ssm_sums(
    delta, log_delta, a, b, v, beta, opens, through, states, time, channels, size,
    N: tl.constexpr, PADDED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of each chunk the sum of the log-decays, (B, chunks, N D), and the states of its tokens alone."""
    first, end, place, columns, inside, _of_chunk = chunk_of(time, channels, CHUNK, BLOCK)
    of_states, all_inside, n, exists = states_of(columns, channels, N, PADDED)
    row = tl.program_id(2).to(tl.int64)
    of_chunk = (row * tl.num_programs(1) + tl.program_id(1)) * N * channels + of_states
    rates = load_channels(a + of_states, all_inside)
    passed, weighted = tl.zeros([BLOCK, PADDED], tl.float32), tl.zeros([BLOCK, PADDED], tl.float32)
    peak, total = passed + NOTHING, passed + 1.0
    top, at, energy = peak, weighted, total
    if beta is not None:
        steep = tl.load(beta + columns, mask=inside, other=1.0)[:, None]
    for t in range(first, end):
        _rate, log_decay, x = entry(delta, log_delta, rates, b, opens, place, row * time + t, inside, n, exists, N)
        value = load_channels(v + place, inside)[:, None]
        peak, total, weighted, _share = add_weights(peak, total, weighted, log_decay, x, 1.0, value)
        if beta is not None:
            top, at, energy, _energy_share = add_energy(top, at, energy, log_decay, steep, x, value, 1.0)
        passed += log_decay
        place += channels
    tl.store(through + of_chunk, passed, mask=all_inside)
    store_three(states, of_chunk, size, all_inside, peak, total, weighted)
    if beta is not None:
        store_three(part_at(states, 3, size), of_chunk, size, all_inside, top, at, energy)


@triton.jit
def ssm_reads(
    delta, log_delta, a, b, c, skip, v, beta, opens, entering, log_weight, mean, free_energy, last,
    time, channels, size, last_size,
    N: tl.constexpr, PADDED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """L, mean and F of every token (B, T, D), and the states after the last, (6 or 3, B, N D), with c = 0."""
    first, end, place, columns, inside, _of_chunk = chunk_of(time, channels, CHUNK, BLOCK)
    of_states, all_inside, n, exists = states_of(columns, channels, N, PADDED)
    row = tl.program_id(2).to(tl.int64)
    of_chunk = (row * tl.num_programs(1) + tl.program_id(1)) * N * channels + of_states
    rates = load_channels(a + of_states, all_inside)
    peak, total, weighted = load_weights(entering, of_chunk, size, all_inside)
    top, at, energy = peak, weighted, total
    own_skip, steep = None, None
    if skip is not None:
        own_skip = load_channels(skip + columns, inside)
    if beta is not None:
        top, at, energy = load_energy(part_at(entering, 3, size), of_chunk, size, all_inside)
        steep = tl.load(beta + columns, mask=inside, other=1.0)
    for t in range(first, end):
        token = row * time + t
        _rate, log_decay, x = entry(delta, log_delta, rates, b, opens, place, token, inside, n, exists, N)
        seen = load_log(c + token * N + n, log_delta, exists)
        value = load_channels(v + place, inside)
        (
            peak, total, weighted, top, at, energy, of_weight, of_free, average, _share, part, own, _energy_share,
            _energy_part, _energy_own,
        ) = visit(peak, total, weighted, top, at, energy, log_decay, x, seen, value, steep, own_skip)  # fmt: skip
        average = tl.sum(of_positive(seen, part) * average, 1)
        if skip is not None:
            average += tl.where(own_skip > 0, own, 0.0) * value
        tl.store(log_weight + place, of_weight, mask=inside)
        tl.store(mean + place, average, mask=inside)
        if beta is not None:
            tl.store(free_energy + place, of_free, mask=inside)
        place += channels
    if end == time:
        of_row = row * N * channels + of_states
        peak, lift = at_least_half(peak, total)
        store_three(last, of_row, last_size, all_inside, peak, total * lift, weighted * lift)
        if beta is not None:
            joined = top + steep[:, None] * at
            energy *= tl.exp((top - joined) + steep[:, None] * at)
            top, lift = at_least_half(joined, energy)
            store_three(
                part_at(last, 3, last_size), of_row, last_size, all_inside, top, tl.zeros_like(at), energy * lift
            )
