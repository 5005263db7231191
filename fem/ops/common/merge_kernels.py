"""What Triton kernels of scans share: how a cell's read is merged with a token, and how cells are read together.

The equations are those of `read.merge` and `read.log_average`, in logarithms and exact at any magnitude. Cells lie
along the first axis, channels along the second.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fem.ops.common import read
from fem.ops.common.triton_math import exp_minus_1

LOG_ZERO, NO_WEIGHT, NEAR = tl.constexpr(read.LOG_ZERO), tl.constexpr(read.NO_WEIGHT), tl.constexpr(30.0)
NUMBERS = 1024  # of a program, 8 for each of 128 threads


@triton.jit
def log_or_zero(x):
    """log x, LOG_ZERO at 0."""
    return tl.where(x > 0.0, tl.log(tl.where(x > 0.0, x, 1.0)), LOG_ZERO)


@triton.jit
def log1p(x):
    """log(1 + x): what 1 + x rounds away is divided out."""
    total = 1.0 + x
    rounded = total - 1.0
    return tl.where(rounded == 0.0, x, tl.log(total) * x / tl.where(rounded == 0.0, 1.0, rounded))


@triton.jit
def log_add(one, other):
    """log(e^one + e^other)"""
    return tl.maximum(one, other) + log1p(tl.exp(-tl.abs(one - other)))


@triton.jit
def expm1(z):
    """exp(z) - 1 for z <= 30."""
    return tl.where(tl.abs(z) <= 1.0, exp_minus_1(tl.minimum(tl.maximum(z, -1.0), 1.0)), tl.exp(z) - 1.0)


@triton.jit
def merged_means(gain, one, other):
    """(1 - share) one + share other, share = sigmoid(gain)."""
    heavier, odds = gain > 0.0, tl.exp(-tl.abs(gain))
    base, rest = tl.where(heavier, other, one), tl.where(heavier, one, other)
    return base + odds / (1.0 + odds) * (rest - base)


@triton.jit
def merged_energies(gain, one, other, rate):
    """(1 / rate) log((1 - share) e^{rate one} + share e^{rate other}), share = sigmoid(gain)."""
    heavier, logit, odds = gain > 0.0, -tl.abs(gain), tl.exp(-tl.abs(gain))
    base, rest = tl.where(heavier, other, one), tl.where(heavier, one, other)
    lift = rate * (rest - base)
    near = log1p(odds / (1.0 + odds) * expm1(tl.minimum(lift, NEAR)))
    far = tl.maximum(logit + lift, 0.0) + log1p(tl.exp(-tl.abs(logit + lift))) - log1p(odds)
    return base + tl.where(lift < NEAR, near, far) / rate


@triton.jit
def log_sum(scores):
    """log sum e^scores over the cells, and by how much the scores are below it; LOG_ZERO and -inf of no weight."""
    top = tl.max(scores, 0)
    total = top + tl.log(tl.sum(tl.exp(scores - top), 0))
    seen = total > NO_WEIGHT
    return tl.where(seen, total, LOG_ZERO), scores - tl.where(seen, total, float("inf"))


@triton.jit
def log_average(log_p, y):
    """log sum p e^y over the cells, of p that sum to 1."""
    seen = log_p > NO_WEIGHT
    top = tl.max(tl.where(seen, y, float("-inf")), 0)
    top = tl.where(top > float("-inf"), top, 0.0)
    z = tl.where(seen, y - top, 0.0)
    near = log1p(tl.sum(tl.exp(log_p) * expm1(tl.maximum(z, -1.0)), 0))
    terms = tl.where(seen, log_p + z, NO_WEIGHT)
    peak = tl.max(terms, 0)
    far = peak + tl.log(tl.sum(tl.exp(terms - peak), 0))
    return top + tl.where(tl.min(z, 0) >= -1.0, near, far)
