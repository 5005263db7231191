"""The backward of the state space scan: the chunks from the last to the first, the states of each computed again.

With theta_n = C_n S_n / y the part of state n in the weight that a token reads, phi_n in the energies, and per state
the shares p, q and the gradients w, s, u of `fem.ops.channel_scan.kernels.backward`, h = dF / beta:

    w_n += theta_n (dL + dmean (mean_n - mean)) + (phi_n - theta_n) h        s_n += theta_n dmean        u_n += phi_n h
    dlog(delta B_n) = p w_n + g_n        dlog_decay_n = (1 - p) w_n - g_n        g_n = p (v - mean_n) s_n + (q - p) u_n

A factor that is exactly 0 has a gradient too: e^{-m} / S takes the place of p / 0. Where log_delta is given, gradients
are those of the logarithms. Partial sums over channels or batches are stored apart, and summed after the kernel. The
scratch of a program holds one chunk's shares, means and parts of the reads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fem.ops.channel_scan.kernels.backward import excess, gradient_of
from fem.ops.channel_scan.kernels.forward import load_three, part_at, store_three
from fem.ops.common.kernels.channel_states import add_energy, add_weights, lowered, part_of, past_of
from fem.ops.common.kernels.decay_steps import load_channels
from fem.ops.common.kernels.tiles import NEARLY_NOTHING
from fem.ops.ssm.kernels.forward import (
    LARGEST,
    entry,
    faded,
    load_energy,
    load_log,
    load_weights,
    look,
    measured,
    of_positive,
    states_of,
)


@triton.jit
def per_unit(exponent, sums, peak):
    """The share that one unit of input would have in a sum; 0 for empty states."""
    return tl.where(peak > NEARLY_NOTHING, tl.exp(tl.minimum(exponent, LARGEST)) / sums, 0.0)


@triton.jit
def ssm_gradients(
    d_log_weight, d_mean, d_free, delta, log_delta, a, b, c, skip, v, beta, opens, entering, behind, mean, free_energy,
    scratch, own_scratch, d_delta, d_log_delta, d_a, d_b, d_c, d_skip, d_v, d_beta, d_start,
    time, chunks, channels, size, start_size, scratch_size, own_size, d_b_size,
    N: tl.constexpr, PADDED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """d_delta, d_log_delta, d_v (B, T, D); of each row d_a (B, N D), d_skip, d_beta (B, D); of each block of channels
    d_b, d_c (blocks, B, T, N); w, s, u of the start from those behind the last token, (3, B, N D)."""
    columns, row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1).to(tl.int64)
    inside = columns < channels
    of_states, all_inside, n, exists = states_of(columns, channels, N, PADDED)
    rates = load_channels(a + of_states, all_inside)
    of_row = row * N * channels + of_states
    w, s, u = load_three(behind, of_row, start_size, all_inside)
    of_a, zero = tl.zeros([BLOCK, PADDED], tl.float32), tl.zeros([BLOCK], tl.float32)
    of_beta, of_skip, own_skip = zero, zero, None
    if skip is not None:
        own_skip = load_channels(skip + columns, inside)
    if beta is not None:
        steep = tl.load(beta + columns, mask=inside, other=1.0)
    d_b += tl.program_id(0).to(tl.int64) * d_b_size
    d_c += tl.program_id(0).to(tl.int64) * d_b_size
    scratch += row * CHUNK * N * channels + of_states
    own_scratch += row * CHUNK * channels + columns

    for back in range(chunks):
        chunk = chunks - 1 - back
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
            peak, total, weighted = faded(peak, total, weighted, log_decay)
            if skip is None:
                _highest, _y, part, own = look(peak, total, seen, zero, own_skip)
                average = weighted / total
            peak, total, weighted, share = add_weights(peak, total, weighted, None, x, 1.0, value[:, None])
            if skip is not None:
                _highest, _y, part, own = look(peak, total, seen, zero, own_skip)
                average = weighted / total
            nothing = x == float("-inf")
            share = tl.where(nothing, per_unit(-peak, total, peak), share)
            tl.store(store, share, mask=all_inside)
            tl.store(part_at(store, 1, scratch_size), average, mask=all_inside)
            tl.store(part_at(store, 2, scratch_size), part, mask=all_inside)
            tl.store(own_store, own, mask=inside)
            if beta is not None:
                top, energy, _stays, _factor, _scale = lowered(top, energy, log_decay)
                if skip is None:
                    _r, exponent, own_exponent = measured(top, at, steep, value, skip)
                    _higher, _z, energy_part, energy_own = look(exponent, energy, seen, own_exponent, own_skip)
                top, at, energy, energy_share = add_energy(
                    top, at, energy, None, steep[:, None], x, value[:, None], 1.0
                )
                if skip is not None:
                    _r, exponent, own_exponent = measured(top, at, steep, value, skip)
                    _higher, _z, energy_part, energy_own = look(exponent, energy, seen, own_exponent, own_skip)
                single = per_unit(steep[:, None] * (value[:, None] - at) - top, energy, top)
                tl.store(part_at(store, 3, scratch_size), tl.where(nothing, single, energy_share), mask=all_inside)
                tl.store(part_at(store, 4, scratch_size), energy_part, mask=all_inside)
                tl.store(part_at(own_store, 1, own_size), energy_own, mask=inside)
        tl.debug_barrier()

        for ahead in range(first, end):
            t = first + end - 1 - ahead
            token, place = row * time + t, (row * time + t) * channels + columns
            kept, own_kept = scratch + (t - first) * N * channels, own_scratch + (t - first) * channels
            rate, _log_decay, x = entry(delta, log_delta, rates, b, opens, place, token, inside, n, exists, N)
            seen, value = load_log(c + token * N + n, log_delta, exists), load_channels(v + place, inside)
            nothing = x == float("-inf")
            share, average = load_channels(kept, all_inside), load_channels(part_at(kept, 1, scratch_size), all_inside)
            part, own = load_channels(part_at(kept, 2, scratch_size), all_inside), load_channels(own_kept, inside)
            energy_share, energy_part, energy_own = share, part, own
            h = zero
            if beta is not None:
                energy_share = load_channels(part_at(kept, 3, scratch_size), all_inside)
                energy_part = load_channels(part_at(kept, 4, scratch_size), all_inside)
                energy_own = load_channels(part_at(own_kept, 1, own_size), inside)
                h = gradient_of(d_free, place, inside, inside) / steep
                of_beta -= h * load_channels(free_energy + place, inside)
            of_weight = gradient_of(d_log_weight, place, inside, inside)
            of_mean = gradient_of(d_mean, place, inside, inside)
            mu = load_channels(mean + place, inside)
            read = part * (of_weight[:, None] + of_mean[:, None] * (average - mu[:, None]))
            read += (energy_part - part) * h[:, None]
            if log_delta is None:
                weight = load_channels(c + token * N + n, exists)
                of_c = tl.where(all_inside, read / tl.where(weight > 0, weight, 1.0), 0.0)
            else:
                of_c = tl.where(all_inside, of_positive(seen, read), 0.0)
            tl.store(d_c + token * N + n, tl.sum(of_c, 0)[None, :], mask=exists)
            own_w, own_s = of_positive(seen, read), of_positive(seen, part) * of_mean[:, None]
            own_u = of_positive(seen, energy_part) * h[:, None]

            of_v = zero
            p, q = tl.where(nothing, 0.0, share), tl.where(nothing, 0.0, energy_share)
            more = excess(q, p)
            away = value[:, None] - average
            if skip is not None:
                w, s, u = w + own_w, s + own_s, u + own_u
                of_skip += own * (of_weight + of_mean * (value - mu)) + (energy_own - own) * h
                of_v += tl.where(own_skip > 0, own, 0.0) * of_mean
                if beta is not None:
                    of_z = tl.where(own_skip > 0, energy_own, 0.0) * h
                    of_v += steep * of_z
                    of_beta += of_z * value
            else:
                away = past_of(away, p)
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
        tl.debug_barrier()

    tl.store(d_a + of_row, of_a, mask=all_inside)
    if skip is not None:
        of_skip /= tl.where(own_skip > 0, own_skip, 1.0)
        tl.store(d_skip + row * channels + columns, of_skip, mask=inside)
    if beta is not None:
        tl.store(d_beta + row * channels + columns, of_beta, mask=inside)
    store_three(d_start, of_row, start_size, all_inside, w, s, u)
