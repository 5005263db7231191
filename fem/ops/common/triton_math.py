"""Functions that Triton kernels share, to float32's rounding."""

import os

import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
LEAST_PROVEN = tl.constexpr(8.75651076269652e-27)  # e^-60
LOG_2 = tl.constexpr(0.6931471805599453)
IEEE = tl.constexpr("ieee")  # of a plain string Triton 3.6 makes no constant where it is a default
STEP = tl.constexpr(16)  # inner columns of a product at a time: with 64 a thread holds half as many registers again
NO_FRACTION = tl.constexpr(8388608.0)  # 2^23: float32 has no fractions from here on


@triton.jit
def dot(left, right, total, PRECISION: tl.constexpr = IEEE):
    """total + left right, in float32; PRECISION: how numbers of 32 bits are multiplied."""
    if INTERPRETED:  # Triton's interpreter multiplies the bits of bfloat16
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, total, input_precision=PRECISION)


@triton.jit
def exp_minus_1(z):
    """exp(z) - 1 for |z| <= 1, by its series, to float32's rounding."""
    total = 1 / 3628800 + z * (1 / 39916800)
    total = 1 / 40320 + z * (1 / 362880 + z * total)
    total = 1 / 720 + z * (1 / 5040 + z * total)
    total = 1 / 24 + z * (1 / 120 + z * total)
    return z * (1.0 + z * (1 / 2 + z * (1 / 6 + z * total)))


@triton.jit
def logarithm(x):
    """log x by the card's own instruction, whose error is 2^-22 near 1; Triton's takes twenty times as many."""
    if INTERPRETED:
        return tl.log(x)
    return libdevice.fast_logf(x)


@triton.jit
def power_of_2(x):
    """2^x by the card's own instruction, of which what is below 2^-126 is 0; Triton's takes three more to keep that."""
    if INTERPRETED:
        return tl.exp2(x)
    return libdevice.exp2(x)


@triton.jit
def exponential(x):
    """e^x as `power_of_2`: what is below 2^-126 is 0."""
    if INTERPRETED:
        return tl.exp(x)
    return libdevice.fast_expf(x)


@triton.jit
def quotient(x, y):
    """x / y for |y| < 2^126 by one reciprocal and one product; Triton's takes seven instructions, of which five are for
    other y, and errs no less: by 2^-22."""
    if INTERPRETED:
        return x / y
    return libdevice.fast_dividef(x, y)


@triton.jit
def sigmoid(a):
    return quotient(1.0, 1.0 + exponential(-a))


@triton.jit
def log_1_plus(x, rounded):
    """log(1 + x), given `rounded`, the logarithm of the rounded 1 + x: near 0 by its series."""
    return tl.where(tl.abs(x) < 0.01, x * (1.0 - x * (0.5 - x * (1 / 3 - x * 0.25))), rounded)


@triton.jit
def is_some(narrow):
    return tl.max(narrow.to(tl.int32)) != 0


@triton.jit
def level(total, narrow):
    """beta (F - c) from R, and R or 1 + R, of which it is the logarithm; 0 and 1 of an R that proves nothing."""
    base = tl.where(total < LEAST_PROVEN, 1.0, total)
    log = logarithm(base)
    if is_some(narrow):
        base = tl.where(narrow, 1.0 + total, base)
        log = logarithm(base)
        log = tl.where(narrow, log_1_plus(total, log), log)
    return log, base


@triton.jit
def energy(z, narrow):
    """e = exp(z); exp(z) - 1 where narrow."""
    e = exponential(z)
    if is_some(narrow):
        e = tl.where(narrow, exp_minus_1(z), e)
    return e


@triton.jit
def lifted(high, rate):
    """The least c from `high` on of which rate c is a multiple of log 2: another one changes e by a power of 2, not its
    rounding."""
    bits = rate / LOG_2
    return tl.where(tl.abs(high * bits) < NO_FRACTION, tl.ceil(high * bits) / bits, high)


@triton.jit
def softplus_and_slope(a):
    """log(1 + e^a) and its derivative sigmoid(a), with one exponential."""
    z = exponential(-tl.abs(a))
    share = quotient(1.0, 1.0 + z)
    return tl.maximum(a, 0.0) + log_1_plus(z, logarithm(1.0 + z)), tl.where(a < 0.0, z * share, share)


@triton.jit
def softplus(a):
    y, _slope = softplus_and_slope(a)
    return y


@triton.jit
def artanh_series(square):
    """artanh(w) / w of w^2 <= 1 / 9, to float32's rounding."""
    series = 1 / 13 + square * (1 / 15)
    series = 1 / 9 + square * (1 / 11 + square * series)
    series = 1 / 5 + square * (1 / 7 + square * series)
    return 1.0 + square * (1 / 3 + square * series)


@triton.jit
def log_1_plus_share(z):
    """log(1 + z) for 0 <= z <= 1 to float32's rounding, as 2 artanh(z / (2 + z))."""
    w = quotient(z, 2.0 + z)
    return 2.0 * w * artanh_series(w * w)


@triton.jit
def exact_softplus(a):
    """log(1 + e^a) to float32's rounding, at any size, as above with z = e^{-|a|}. With the card's own exponential and
    division the conditioner's widest kernel would spill."""
    z = tl.exp(-tl.abs(a))
    w = z / (2.0 + z)
    series = artanh_series(w * w)
    return tl.maximum(a, 0.0) + 2.0 * w * series


@triton.jit
def slope_of_beta(beta):
    """d beta / d theta = 1 - e^-beta, of beta = softplus(theta + its start)."""
    return tl.where(beta < 1.0, -exp_minus_1(-tl.minimum(beta, 1.0)), 1.0 - tl.exp(-beta))


@triton.jit
def turned(x, cos, sin, there, HALF: tl.constexpr):
    """x_j cos - x_{j+HALF} sin and x_{j+HALF} cos + x_j sin, in float32; x: the first of each pair."""
    low = tl.load(x, there, other=0.0).to(tl.float32)
    high = tl.load(x + HALF, there, other=0.0).to(tl.float32)
    return low * cos - high * sin, high * cos + low * sin


@triton.jit
def through_gate(logit, u, d_o, there, width, eps):
    """The gradients of the logit and of u from that of o = u gate(logit): with s = softplus(logit) and r the norm's
    factor, ds = r (h - r^2 mean(h s) s), h = u do. Where d_o is 0 along a row, so are they."""
    s, slope = softplus_and_slope(logit)
    s = tl.where(there, s, 0.0)
    r = tl.rsqrt(tl.sum(s * s, 1) * (1.0 / width) + eps)[:, None]
    h = d_o * u
    d_s = r * (h - r * r * (tl.sum(h * s, 1) * (1.0 / width))[:, None] * s)
    return d_s * slope, d_o * (r * s)


@triton.jit
def gate(logit, there, width, eps):
    """RMSNorm of softplus(logit) along the second axis, over `width` entries that are there."""
    s = tl.where(there, softplus(logit.to(tl.float32)), 0.0)
    return tl.rsqrt(tl.sum(s * s, 1) * (1.0 / width) + eps)[:, None] * s


@triton.jit
def product(x, token, rows, x_row, weight, head, width: tl.constexpr, INNER: tl.constexpr, column):
    """x W^T of a tile of tokens, for the columns of a head, from x (tokens, INNER) and W (H width, INNER)."""
    total = tl.zeros((rows.shape[0], column.shape[0]), tl.float32)
    for first in tl.range(0, INNER, STEP, num_stages=2):  # unrolled, all steps would be held in shared memory
        inner = first + tl.arange(0, STEP)
        left = tl.load(x + token * x_row + inner[None], rows[:, None] & (inner < INNER)[None], other=0.0)
        right = weight + (head * width + column)[None] * INNER + inner[:, None]
        right = tl.load(right, (column < width)[None] & (inner < INNER)[:, None], other=0.0)
        total = dot(left, right, total)
    return total
