"""The backward of the state space scan, all chunks side by side, the states of each computed again from its first.

With theta_n = C_n S_n / y the part of state n in the weight that a token reads, phi_n in the energies, and per state
the shares p, q and the gradients w, s, u of `fem.ops.channel_scan.kernels.backward`, h = dF / beta:

    w_n += theta_n (dL + dmean (mean_n - mean)) + (phi_n - theta_n) h        s_n += theta_n dmean        u_n += phi_n h
    dlog(delta B_n) = p w_n + g_n        dlog_decay_n = (1 - p) w_n - g_n        g_n = p (v - mean_n) s_n + (q - p) u_n

`ssm_gradient_sums` finds what each chunk adds to w, s, u at its first token, and lets through of those from behind it,
`channel_gradient_carry` then what enters each from behind, and `ssm_gradients` the gradients of its tokens.
A factor that is exactly 0 has a gradient too: e^{-m} / S takes the place of p / 0. Where log_delta is given, gradients
are those of the logarithms. Sums over channels, chunks or batches are stored in parts, and completed after the kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fem.ops.channel_scan.kernels.backward import excess, gradient_of
from fem.ops.channel_scan.kernels.forward import load_three, part_at, store_three
from fem.ops.common.kernels.channel_states import part_of, past_of
from fem.ops.common.kernels.decay_steps import chunk_of, load_channels
from fem.ops.ssm.kernels.forward import (
    entry,
    load_energy,
    load_log,
    load_weights,
    of_positive,
    states_of,
    visit,
)


@triton.jit
def reads_of(d_log_weight, d_mean, d_free, mean, steep, place, inside):
    """dL, dmean, h and the mean of one token."""
    of_weight, of_mean = (
        gradient_of(d_log_weight, place, inside, inside), gradient_of(d_mean, place, inside, inside),
    )  # fmt: skip
    h = tl.zeros(inside.shape, tl.float32)
    if steep is not None:
        h = gradient_of(d_free, place, inside, inside) / steep
    return of_weight, of_mean, h, load_channels(mean + place, inside)


@triton.jit
def pull(part, energy_part, average, of_weight, of_mean, h, mu, seen):
    """The gradient of log C_n, and what one read adds to w, s and u."""
    read = part * (of_weight[:, None] + of_mean[:, None] * (average - mu[:, None]))
    read += (energy_part - part) * h[:, None]
    own_s, own_u = of_positive(seen, part) * of_mean[:, None], of_positive(seen, energy_part) * h[:, None]
    return read, of_positive(seen, read), own_s, own_u


@triton.jit
def flow_of(share, energy_share, x, value, average, own_skip):
    """p, q, q - p and v - mean_n of a token: with them w, s, u flow to the token before."""
    nothing = x == float("-inf")
    p, q = tl.where(nothing, 0.0, share), tl.where(nothing, 0.0, energy_share)
    away = value[:, None] - average
    if own_skip is None:
        away = past_of(away, p)
    return p, q, excess(q, p), away


@triton.jit
def ssm_gradient_sums(
    d_log_weight, d_mean, d_free, delta, log_delta, a, b, c, skip, v, beta, opens, entering, mean, through, flows,
    time, channels, size,
    N: tl.constexpr, PADDED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """For each chunk, w, s, u before its first token from its own gradients, and the factors of those from behind it.

    through (4, B, chunks, N D): the factor of w and of s, that of u, those of s and of u in w.
    """
    first, end, place, columns, inside, _of_chunk = chunk_of(time, channels, CHUNK, BLOCK)
    of_states, all_inside, n, exists = states_of(columns, channels, N, PADDED)
    row = tl.program_id(2).to(tl.int64)
    of_chunk = (row * tl.num_programs(1) + tl.program_id(1)) * N * channels + of_states
    rates = load_channels(a + of_states, all_inside)
    own_skip, steep = None, None
    if skip is not None:
        own_skip = load_channels(skip + columns, inside)
    peak, total, weighted = load_weights(entering, of_chunk, size, all_inside)
    top, at, energy = peak, weighted, total
    if beta is not None:
        top, at, energy = load_energy(part_at(entering, 3, size), of_chunk, size, all_inside)
        steep = tl.load(beta + columns, mask=inside, other=1.0)
    w = tl.zeros([BLOCK, PADDED], tl.float32)
    s, u, s_to_w, u_to_w = w, w, w, w
    lets, energy_lets = w + 1.0, w + 1.0
    for t in range(first, end):
        token = row * time + t
        _rate, log_decay, x = entry(delta, log_delta, rates, b, opens, place, token, inside, n, exists, N)
        seen, value = load_log(c + token * N + n, log_delta, exists), load_channels(v + place, inside)
        (
            peak, total, weighted, top, at, energy, _log_weight, _free, average, share, part, _own, energy_share,
            energy_part, _energy_own,
        ) = visit(peak, total, weighted, top, at, energy, log_decay, x, seen, value, steep, own_skip)  # fmt: skip
        of_weight, of_mean, h, mu = reads_of(d_log_weight, d_mean, d_free, mean, steep, place, inside)
        _read, own_w, own_s, own_u = pull(part, energy_part, average, of_weight, of_mean, h, mu, seen)
        p, q, more, away = flow_of(share, energy_share, x, value, average, own_skip)
        if opens is not None:
            goes_on = tl.load(opens + token) == 0
            lets, energy_lets = tl.where(goes_on, lets, 0.0), tl.where(goes_on, energy_lets, 0.0)
            s_to_w, u_to_w = tl.where(goes_on, s_to_w, 0.0), tl.where(goes_on, u_to_w, 0.0)
        seen_lets, seen_energy_lets, seen_s, seen_u = lets, energy_lets, s_to_w, u_to_w
        s_to_w, u_to_w = past_of(s_to_w, p) - part_of(p) * away * lets, past_of(u_to_w, q) - more * lets
        lets, energy_lets = past_of(lets, p), past_of(energy_lets, q)
        if own_skip is not None:  # the read has seen the token
            seen_lets, seen_energy_lets, seen_s, seen_u = lets, energy_lets, s_to_w, u_to_w
        w += seen_lets * own_w + seen_s * own_s + seen_u * own_u
        s, u = s + seen_lets * own_s, u + seen_energy_lets * own_u
        place += channels
    store_three(flows, of_chunk, size, all_inside, w, s, u)
    store_three(through, of_chunk, size, all_inside, lets, energy_lets, s_to_w)
    tl.store(part_at(through, 3, size) + of_chunk, u_to_w, mask=all_inside)


@triton.jit
def ssm_gradients(
    d_log_weight, d_mean, d_free, delta, log_delta, a, b, c, skip, v, beta, opens, entering, flows, mean, free_energy,
    scratch, own_scratch, d_delta, d_log_delta, d_a, d_b, d_c, d_skip, d_v, d_beta, d_start,
    time, chunks, channels, size, flows_size, start_size, scratch_size, own_size, d_b_size,
    N: tl.constexpr, PADDED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """d_delta, d_log_delta, d_v (B, T, D); of each program d_a (B, programs, N D), d_skip, d_beta (B, programs, D); of
    each block of channels d_b, d_c (blocks, B, T, N); w, s, u of the start, (3, B, N D).

    A program takes every num_programs(1)-th chunk. Its scratch holds one chunk's shares, means and parts of the reads.
    """
    columns, row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(2).to(tl.int64)
    inside = columns < channels
    of_states, all_inside, n, exists = states_of(columns, channels, N, PADDED)
    rates = load_channels(a + of_states, all_inside)
    of_a, zero = tl.zeros([BLOCK, PADDED], tl.float32), tl.zeros([BLOCK], tl.float32)
    of_beta, of_skip, own_skip, steep = zero, zero, None, None
    if skip is not None:
        own_skip = load_channels(skip + columns, inside)
    if beta is not None:
        steep = tl.load(beta + columns, mask=inside, other=1.0)
    d_b += tl.program_id(0).to(tl.int64) * d_b_size
    d_c += tl.program_id(0).to(tl.int64) * d_b_size
    program = row * tl.num_programs(1) + tl.program_id(1)
    scratch += program * CHUNK * N * channels + of_states
    own_scratch += program * CHUNK * channels + columns

    for chunk in range(tl.program_id(1), chunks, tl.num_programs(1)):
        first = chunk * CHUNK
        end = tl.minimum(first + CHUNK, time)
        of_chunk = (row * chunks + chunk) * N * channels + of_states
        peak, total, weighted = load_weights(entering, of_chunk, size, all_inside)
        top, at, energy = peak, weighted, total
        if beta is not None:
            top, at, energy = load_energy(part_at(entering, 3, size), of_chunk, size, all_inside)
        for t in range(first, end):
            token, place = row * time + t, (row * time + t) * channels + columns
            store, own_store = scratch + (t - first) * N * channels, own_scratch + (t - first) * channels
            _rate, log_decay, x = entry(delta, log_delta, rates, b, opens, place, token, inside, n, exists, N)
            seen, value = load_log(c + token * N + n, log_delta, exists), load_channels(v + place, inside)
            (
                peak, total, weighted, top, at, energy, _log_weight, _free, average, share, part, own, energy_share,
                energy_part, energy_own,
            ) = visit(peak, total, weighted, top, at, energy, log_decay, x, seen, value, steep, own_skip)  # fmt: skip
            store_three(store, 0, scratch_size, all_inside, share, average, part)
            tl.store(own_store, own, mask=inside)
            if beta is not None:
                tl.store(part_at(store, 3, scratch_size), energy_share, mask=all_inside)
                tl.store(part_at(store, 4, scratch_size), energy_part, mask=all_inside)
                tl.store(part_at(own_store, 1, own_size), energy_own, mask=inside)
        tl.debug_barrier()

        w, s, u = load_three(flows, of_chunk, flows_size, all_inside)
        for ahead in range(first, end):
            t = first + end - 1 - ahead
            token, place = row * time + t, (row * time + t) * channels + columns
            kept, own_kept = scratch + (t - first) * N * channels, own_scratch + (t - first) * channels
            rate, _log_decay, x = entry(delta, log_delta, rates, b, opens, place, token, inside, n, exists, N)
            seen, value = load_log(c + token * N + n, log_delta, exists), load_channels(v + place, inside)
            nothing = x == float("-inf")
            share, average, part = load_three(kept, 0, scratch_size, all_inside)
            own = load_channels(own_kept, inside)
            energy_share, energy_part, energy_own = share, part, own
            if beta is not None:
                energy_share = load_channels(part_at(kept, 3, scratch_size), all_inside)
                energy_part = load_channels(part_at(kept, 4, scratch_size), all_inside)
                energy_own = load_channels(part_at(own_kept, 1, own_size), inside)
            of_weight, of_mean, h, mu = reads_of(d_log_weight, d_mean, d_free, mean, steep, place, inside)
            if beta is not None:
                of_beta -= h * load_channels(free_energy + place, inside)
            read, own_w, own_s, own_u = pull(part, energy_part, average, of_weight, of_mean, h, mu, seen)
            if log_delta is None:
                weight = load_channels(c + token * N + n, exists)
                of_c = tl.where(all_inside, read / tl.where(weight > 0, weight, 1.0), 0.0)
            else:
                of_c = tl.where(all_inside, own_w, 0.0)
            tl.store(d_c + token * N + n, tl.sum(of_c, 0)[None, :], mask=exists)

            of_v = zero
            if skip is not None:
                w, s, u = w + own_w, s + own_s, u + own_u
                of_skip += own * (of_weight + of_mean * (value - mu)) + (energy_own - own) * h
                of_v += tl.where(own_skip > 0, own, 0.0) * of_mean
                if beta is not None:
                    of_z = tl.where(own_skip > 0, energy_own, 0.0) * h
                    of_v += steep * of_z
                    of_beta += of_z * value
            p, q, more, away = flow_of(share, energy_share, x, value, average, own_skip)
            g = part_of(p) * away * s + more * u
            of_x = part_of(p) * w + g
            single = share * (w - u + away * s) + energy_share * u
            of_v += tl.sum(part_of(p) * s, 1)
            if beta is not None:
                of_z = tl.sum(part_of(q) * u, 1)
                of_v += steep * of_z
                of_beta += of_z * value
            w, s, u = past_of(w, p) - g, past_of(s, p), past_of(u, q)
            if skip is None:
                w, s, u = w + own_w, s + own_s, u + own_u
            if opens is not None:
                goes_on = tl.load(opens + token) == 0
                w, s, u = tl.where(goes_on, w, 0.0), tl.where(goes_on, s, 0.0), tl.where(goes_on, u, 0.0)
            of_a += w * rate
            if log_delta is None:
                enters = load_channels(b + token * N + n, exists)
                of_enters = tl.where(nothing, single * rate, of_x / enters)
                of_rate = tl.where(nothing, single * enters, of_x / rate) + w * rates
            else:
                of_enters, of_rate = tl.where(nothing, 0.0, of_x), w * rates
                of_log_rate = tl.sum(tl.where(all_inside, of_enters, 0.0), 1)
                tl.store(d_log_delta + place, of_log_rate, mask=inside)
            tl.store(d_b + token * N + n, tl.sum(tl.where(all_inside, of_enters, 0.0), 0)[None, :], mask=exists)
            tl.store(d_delta + place, tl.sum(tl.where(all_inside, of_rate, 0.0), 1), mask=inside)
            tl.store(d_v + place, of_v, mask=inside)
        if chunk == 0:
            store_three(d_start, row * N * channels + of_states, start_size, all_inside, w, s, u)
        tl.debug_barrier()

    tl.store(d_a + program * N * channels + of_states, of_a, mask=all_inside)
    if skip is not None:
        of_skip /= tl.where(own_skip > 0, own_skip, 1.0)
        tl.store(d_skip + program * channels + columns, of_skip, mask=inside)
    if beta is not None:
        tl.store(d_beta + program * channels + columns, of_beta, mask=inside)
