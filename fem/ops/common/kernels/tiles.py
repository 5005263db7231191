"""Tiles of a contiguous matrix, and powers of two that keep their digits: what all kernels share."""

from __future__ import annotations

import triton
import triton.language as tl

LN_2 = tl.constexpr(0.6931471805599453)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_rows(matrix, rows, stride, end, WIDTH: tl.constexpr, PADDED: tl.constexpr, RAGGED: tl.constexpr):
    """matrix[rows, :WIDTH] with columns of zeros up to PADDED; with RAGGED, zeros in rows from `end` on."""
    columns = tl.arange(0, PADDED)
    at = matrix + rows[:, None] * stride + columns[None, :]
    if WIDTH == PADDED:
        if RAGGED:
            return tl.load(at, mask=rows[:, None] < end, other=0.0)
        return tl.load(at)
    inside = columns[None, :] < WIDTH
    if RAGGED:
        inside &= rows[:, None] < end
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def store_rows(matrix, rows, stride, end, x, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    columns = tl.arange(0, PADDED)
    at = matrix + rows[:, None] * stride + columns[None, :]
    tl.store(at, x.to(matrix.dtype.element_ty), mask=(rows[:, None] < end) & (columns[None, :] < WIDTH))


@triton.jit
def halves(x, ROWS: tl.constexpr, HALF: tl.constexpr):
    """[a | b] as a, b."""
    return tl.split(tl.permute(tl.reshape(x, (ROWS, 2, HALF)), (0, 2, 1)))


@triton.jit
def exp2_shifted(w, shift):
    """2^(w - shift) for an integer shift, on which no digit of the result depends."""
    whole = tl.floor(w)
    return tl.exp2(w - whole) * tl.exp2(whole - shift)


@triton.jit
def log2_shifted(r, one, shift):
    """log2(r + one) + shift to the last digit, for an integer shift and one = 0 or 1; r + one > 0 and normal."""
    total = r + one
    bits = total.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F400000) >> 23
    mantissa = (bits - (exponent << 23)).to(tl.float32, bitcast=True)  # between 3/4 and 3/2
    lost = (r - (total - one)) * ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    x = ((mantissa - 1.0) + lost) / (mantissa + 1.0)
    square = x * x
    series = 1.0 + square * (1.0 / 3 + square * (1.0 / 5 + square * (1.0 / 7 + square * (1.0 / 9))))
    return (2.0 * LOG2_E) * x * series + (exponent.to(tl.float32) + shift)  # 2 artanh(x) = log(mantissa)


@triton.jit
def exp2_less_one(w):
    """2^w - 1 for |w| <= 1, to the last digit: x (1 + x/2 (1 + x/3 (1 + ...)))."""
    x = w * LN_2
    series = tl.full(x.shape, 1.0, tl.float32)
    for n in tl.static_range(10, 1, -1):
        series = 1.0 + series * x * (1.0 / n)
    return x * series


@triton.jit
def tf32(x):
    """x to the nearest number of 11 digits, of which a tf32 product drops none."""
    return ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
