"""What all scans along time share: the tokens of a program, and one decaying step, h = e^{log_decay} h."""

from __future__ import annotations

import triton
import triton.language as tl

SLIGHT = tl.constexpr(-0.25)  # decays above it are slight


@triton.jit
def chunk_of(time, channels, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """First and last token, place of the first in a (B, T, C) tensor, channels and which exist, place of the chunk."""
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    chunk, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    first = chunk * CHUNK
    end = tl.minimum(first + CHUNK, time)
    place = (batch * time + first) * channels + columns
    return first, end, place, columns, columns < channels, (batch * tl.num_programs(1) + chunk) * channels + columns


@triton.jit
def load_channels(at, inside):
    return tl.load(at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def exp_less_one(x):
    """e^x - 1 for |x| <= 1/4, to the last digit: x (1 + x/2 (1 + x/3 (1 + ...)))."""
    series = tl.full(x.shape, 1.0, tl.float32)
    for n in tl.static_range(7, 1, -1):
        series = 1.0 + series * x * (1.0 / n)
    return x * series


@triton.jit
def decay_of(log_decay):
    """(stays, factor) such that e^{log_decay} h = h (if stays) + factor h.

    For a slight decay, factor is e^{log_decay} - 1: the rounding of factors near 1 would pile up over many steps.
    """
    stays = log_decay > SLIGHT
    factor = tl.where(stays, exp_less_one(tl.where(stays, log_decay, 0.0)), tl.exp(log_decay))
    return stays, factor


@triton.jit
def decayed(h, stays, factor):
    return tl.where(stays, h, 0.0) + factor * h
