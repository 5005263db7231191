"""The logarithm of no weight, and powers of two that keep their digits: what all kernels share."""

from __future__ import annotations

import triton
import triton.language as tl

from fem.ops.common.read import LOG_ZERO, NO_WEIGHT

NOTHING = tl.constexpr(LOG_ZERO)
NEARLY_NOTHING = tl.constexpr(NO_WEIGHT)  # logarithms below it stand for no weight
LN_2 = tl.constexpr(0.6931471805599453)
LOG2_E = tl.constexpr(1.4426950408889634)


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
