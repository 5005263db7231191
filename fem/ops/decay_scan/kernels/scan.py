"""Sums in which older terms decay, h_t = e^{a_t} h_{t-1} + u_t, and their gradients.

    r_t = dh_t + e^{a_{t+1}} r_{t+1}        du_t = r_t        da_t = e^{a_t} r_t h_{t-1}

Time is cut into chunks that run side by side: one pass finds what each chunk adds and its whole decay, as a logarithm,
a short scan over the chunks finds the state that enters each, and a second pass runs the recurrence from there.
All tensors are contiguous, (B, T, C); a program takes BLOCK channels of one chunk.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fem.ops.common.kernels.decay_steps import chunk_of, decay_of, decayed, load_channels


@triton.jit
def scan_sums(log_decay, u, through, added, time, channels, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """Of each chunk, the sum of log_decay and what its tokens add, both (B, chunks, C)."""
    first, end, place, _, inside, of_chunk = chunk_of(time, channels, CHUNK, BLOCK)
    h = tl.zeros([BLOCK], tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for _ in range(first, end):
        a = load_channels(log_decay + place, inside)
        stays, factor = decay_of(a)
        h = decayed(h, stays, factor) + load_channels(u + place, inside)
        total += a
        place += channels
    tl.store(through + of_chunk, total, mask=inside)
    tl.store(added + of_chunk, h, mask=inside)


@triton.jit
def scan_carry(through, added, start, chunks, channels, REVERSED: tl.constexpr, BLOCK: tl.constexpr):
    """What enters each chunk, in the place of `added`, from the `start` (B, C) before the first (or after the last)."""
    columns, batch = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1).to(tl.int64)
    inside, place, step = columns < channels, batch * chunks * channels + columns, channels
    if REVERSED:
        place, step = place + (chunks - 1) * channels, -channels
    h = tl.load(start + batch * channels + columns, mask=inside, other=0.0)
    for _ in range(chunks):
        stays, factor = decay_of(tl.load(through + place, mask=inside, other=0.0))
        own = tl.load(added + place, mask=inside, other=0.0)
        tl.store(added + place, h, mask=inside)
        h = decayed(h, stays, factor) + own
        place += step


@triton.jit
def scan_chunks(log_decay, u, entering, h_out, time, channels, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """h, from what enters each chunk, (B, chunks, C)."""
    first, end, place, _, inside, of_chunk = chunk_of(time, channels, CHUNK, BLOCK)
    h = tl.load(entering + of_chunk, mask=inside, other=0.0)
    for _ in range(first, end):
        stays, factor = decay_of(load_channels(log_decay + place, inside))
        h = decayed(h, stays, factor) + load_channels(u + place, inside)
        tl.store(h_out + place, h, mask=inside)
        place += channels


@triton.jit
def gradient_sums(log_decay, grad, through, added, time, channels, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """Of each chunk, the sum of log_decay and what its gradients send to the token before it."""
    first, end, place, _, inside, of_chunk = chunk_of(time, channels, CHUNK, BLOCK)
    place += (end - 1 - first) * channels
    flow = tl.zeros([BLOCK], tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for _ in range(first, end):
        a = load_channels(log_decay + place, inside)
        stays, factor = decay_of(a)
        flow = decayed(flow + load_channels(grad + place, inside), stays, factor)
        total += a
        place -= channels
    tl.store(through + of_chunk, total, mask=inside)
    tl.store(added + of_chunk, flow, mask=inside)


@triton.jit
def gradient_chunks(
    log_decay, grad, h, start, entering, d_decay, d_u, d_start, time, channels,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradients of log_decay and u, and of the start (B, C), from what enters each chunk behind its last token."""
    first, end, place, columns, inside, of_chunk = chunk_of(time, channels, CHUNK, BLOCK)
    row, of_row = place - first * channels, tl.program_id(2).to(tl.int64) * channels + columns
    place += (end - 1 - first) * channels
    h_0 = tl.load(start + of_row, mask=inside, other=0.0)
    flow = tl.load(entering + of_chunk, mask=inside, other=0.0)
    for _ in range(first, end):
        follows = place > row
        stays, factor = decay_of(load_channels(log_decay + place, inside))
        reach = flow + load_channels(grad + place, inside)
        flow = decayed(reach, stays, factor)
        before = tl.where(follows, load_channels(h + place - channels, inside & follows), h_0)
        tl.store(d_u + place, reach, mask=inside)
        tl.store(d_decay + place, flow * before, mask=inside)
        place -= channels
    if tl.program_id(1) == 0:
        tl.store(d_start + of_row, flow, mask=inside)
