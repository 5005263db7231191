"""The forward of the channel scan: what every token reads from the two streams of its channel.

    L_t = m_t + log S_t(1)        mean_t = S_t(v) / S_t(1)        F_t = c_t + (log(E_t / S_t(1)) + n_t - m_t) / beta

in chunks of tokens: the sums of each chunk alone, a scan over the chunks for the state that enters each, then the reads
in each. States are (3, B, .., C): m, S(1), S(v); with a beta (6, B, .., C): n, c, E too. Tensors are contiguous and
(B, T, C).
"""

from __future__ import annotations

import triton
import triton.language as tl

from fem.ops.common.kernels.channel_states import add_energy, add_weights, at_least_half, token
from fem.ops.common.kernels.decay_steps import chunk_of, load_channels
from fem.ops.common.kernels.tiles import NOTHING


@triton.jit
def part_at(states, number: tl.constexpr, size):
    """One of the 3 or 6 parts of states; its offset may need 64 bits."""
    return states + tl.cast(size, tl.int64) * number


@triton.jit
def load_three(states, place, size, inside):
    return (
        load_channels(states + place, inside), load_channels(part_at(states, 1, size) + place, inside),
        load_channels(part_at(states, 2, size) + place, inside),
    )  # fmt: skip


@triton.jit
def store_three(states, place, size, inside, one, two, three):
    tl.store(states + place, one, mask=inside)
    tl.store(part_at(states, 1, size) + place, two, mask=inside)
    tl.store(part_at(states, 2, size) + place, three, mask=inside)


@triton.jit
def channel_sums(
    log_decay, x, v, beta, through, states, time, channels, size, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):
    """For each chunk, the sum of log_decay, (B, chunks, C), and the state of its tokens alone."""
    first, end, place, columns, inside, of_chunk = chunk_of(time, channels, CHUNK, BLOCK)
    peak, total = tl.full([BLOCK], NOTHING, tl.float32), tl.full([BLOCK], 1.0, tl.float32)
    weighted, passed = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    top, at, energy = peak, weighted, total
    if beta is not None:
        rate = tl.load(beta + columns, mask=inside, other=1.0)
    for _ in range(first, end):
        a = None
        if log_decay is not None:
            a = load_channels(log_decay + place, inside)
            passed += a
        weight, value = token(x, v, place, inside)
        peak, total, weighted, _share = add_weights(peak, total, weighted, a, weight, 1.0, value)
        if beta is not None:
            top, at, energy, _share = add_energy(top, at, energy, a, rate, weight, value, 1.0)
        place += channels
    tl.store(through + of_chunk, passed, mask=inside)
    store_three(states, of_chunk, size, inside, peak, total, weighted)
    if beta is not None:
        store_three(part_at(states, 3, size), of_chunk, size, inside, top, at, energy)


@triton.jit
def channel_carry(beta, through, states, start, chunks, channels, size, start_size, BLOCK: tl.constexpr):
    """The state that enters each chunk, written over the chunk's own, from the start (6 or 3, B, C)."""
    columns, batch = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1).to(tl.int64)
    inside, place, of_row = columns < channels, batch * chunks * channels + columns, batch * channels + columns
    peak, total, weighted = load_three(start, of_row, start_size, inside)
    top, at, energy = peak, weighted, total
    if beta is not None:
        top, at, energy = load_three(part_at(start, 3, start_size), of_row, start_size, inside)
        rate = tl.load(beta + columns, mask=inside, other=1.0)
    for _ in range(chunks):
        a = load_channels(through + place, inside)
        x, own, own_weighted = load_three(states, place, size, inside)
        store_three(states, place, size, inside, peak, total, weighted)
        peak, total, weighted, _share = add_weights(peak, total, weighted, a, x, own, own_weighted)
        if beta is not None:
            x, value, own = load_three(part_at(states, 3, size), place, size, inside)
            store_three(part_at(states, 3, size), place, size, inside, top, at, energy)
            top, at, energy, _share = add_energy(top, at, energy, a, rate, x, value, own)
        place += channels


@triton.jit
def channel_reads(
    log_decay, x, v, beta, entering, log_weight, mean, free_energy, share, energy_share, last,
    time, channels, size, last_size, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """L, mean, F and the shares of every token (B, T, C), and the state after the last, (6 or 3, B, C), with c = 0."""
    first, end, place, columns, inside, of_chunk = chunk_of(time, channels, CHUNK, BLOCK)
    peak, total, weighted = load_three(entering, of_chunk, size, inside)
    top, at, energy = peak, weighted, total
    if beta is not None:
        top, at, energy = load_three(part_at(entering, 3, size), of_chunk, size, inside)
        rate = tl.load(beta + columns, mask=inside, other=1.0)
    for _ in range(first, end):
        a = None
        if log_decay is not None:
            a = load_channels(log_decay + place, inside)
        weight, value = token(x, v, place, inside)
        peak, total, weighted, part = add_weights(peak, total, weighted, a, weight, 1.0, value)
        tl.store(log_weight + place, peak + tl.log(total), mask=inside)
        tl.store(mean + place, weighted / total, mask=inside)
        tl.store(share + place, part, mask=inside)
        if beta is not None:
            top, at, energy, part = add_energy(top, at, energy, a, rate, weight, value, 1.0)
            tl.store(free_energy + place, at + (tl.log(energy / total) + (top - peak)) / rate, mask=inside)
            tl.store(energy_share + place, part, mask=inside)
        place += channels
    if end == time:
        of_row = tl.program_id(2).to(tl.int64) * channels + columns
        peak, lift = at_least_half(peak, total)
        store_three(last, of_row, last_size, inside, peak, total * lift, weighted * lift)
        if beta is not None:
            joined = top + rate * at
            energy *= tl.exp((top - joined) + rate * at)
            top, lift = at_least_half(joined, energy)
            store_three(part_at(last, 3, last_size), of_row, last_size, inside, top, tl.zeros_like(at), energy * lift)
