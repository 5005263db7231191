"""What Triton kernels of scans share: how a cell's read is merged with a token, and how cells are read together.

The equations are those of `read.merge` and `read.log_average`, in logarithms and exact at any magnitude.

    L' = log(e^{L + a} + e^x)        keep = e^{L + a - L'}        own = e^{x - L'}
    mean' = keep mean + own v        e^{beta F'} = keep e^{beta F} + own e^{beta f}

A share is at most 1 and the two sum to 1, so nothing overflows, nothing that counts is lost, and nothing has to be
proven. With rho, gamma and w the gradients of mean', F' and L', those of a cell before the token, and of the token, are

    d mean = keep rho                        dF = keep e^{beta (F - F')} gamma
    dL = da = keep ((mean - mean') rho + w) + keep (e^{beta (F - F')} - 1) gamma / beta
    dv = own rho                             df = own e^{beta (f - F')} gamma
    dx = own ((v - mean') rho + w) + own (e^{beta (f - F')} - 1) gamma / beta
"""

from __future__ import annotations

import triton
import triton.language as tl

from fem.ops.common import read
from fem.ops.common.launch import cdiv
from fem.ops.common.triton_math import (
    artanh_series,
    exp_minus_1,
    exponential,
    log_1_plus_share,
    logarithm,
    quotient,
)

LOG_ZERO, NO_WEIGHT, NEAR = tl.constexpr(read.LOG_ZERO), tl.constexpr(read.NO_WEIGHT), tl.constexpr(30.0)
NUMBERS = 1024  # of a program, 8 for each of 128 threads
FEWEST = 4  # pieces of a row, of which every token is read twice


def pieces_of(time: int, most: int, shortest: int, unit: int = 1) -> tuple[int, int]:
    """Into how many pieces rows are cut, at most so many and of about `shortest` tokens or more, and of how many tokens
    each is but the last, a multiple of `unit`. Rows that would make few pieces are one."""
    pieces = min(cdiv(time, shortest), most)
    length = unit * cdiv(cdiv(time, unit), pieces) if pieces >= FEWEST else time
    return cdiv(time, length), length


@triton.jit
def block_and_row(width, BLOCK: tl.constexpr):
    """Which block of channels, and of which row or piece of one, a program has; one axis of a grid, as others end at
    65,535 programs."""
    blocks = tl.cdiv(width, BLOCK)
    return tl.program_id(0) % blocks, tl.program_id(0) // blocks


@triton.jit
def log_or_zero(x):
    """log x, LOG_ZERO at 0."""
    return tl.where(x > 0.0, tl.log(tl.where(x > 0.0, x, 1.0)), LOG_ZERO)


@triton.jit
def log1p(x):
    """log(1 + x) for x >= -2/3, as 2 artanh(x / (2 + x)) where x is 1 at most: it is added up over tokens."""
    w = quotient(tl.minimum(x, 1.0), 2.0 + tl.minimum(x, 1.0))
    return tl.where(x <= 1.0, 2.0 * w * artanh_series(w * w), logarithm(1.0 + x))


@triton.jit
def log_add(one, other):
    """log(e^one + e^other)"""
    return tl.maximum(one, other) + log_1_plus_share(exponential(-tl.abs(one - other)))


@triton.jit
def expm1(z):
    """exp(z) - 1 for z <= 30."""
    return tl.where(tl.abs(z) <= 1.0, exp_minus_1(tl.minimum(tl.maximum(z, -1.0), 1.0)), exponential(z) - 1.0)


@triton.jit
def merged_means(gain, one, other):
    """(1 - share) one + share other, share = sigmoid(gain)."""
    heavier, odds = gain > 0.0, exponential(-tl.abs(gain))
    base, rest = tl.where(heavier, other, one), tl.where(heavier, one, other)
    return base + quotient(odds, 1.0 + odds) * (rest - base)


@triton.jit
def merged_energies(gain, one, other, rate):
    """(1 / rate) log((1 - share) e^{rate one} + share e^{rate other}), share = sigmoid(gain)."""
    heavier, odds = gain > 0.0, exponential(-tl.abs(gain))
    base, rest = tl.where(heavier, other, one), tl.where(heavier, one, other)
    lift = rate * (rest - base)
    level = lift - tl.abs(gain)  # of the lighter one's energy beside the heavier one's
    near = quotient(odds, 1.0 + odds) * expm1(tl.minimum(lift, NEAR))
    log = log1p(tl.where(lift < NEAR, near, exponential(-tl.abs(level))))
    nats = tl.where(lift < NEAR, log, log + tl.maximum(level, 0.0) - log_1_plus_share(odds))
    return base + nats * quotient(1.0, rate)


@triton.jit
def added(total, lost, more):
    """total + more, in two numbers: the rounding of one would be a drift."""
    more += lost
    after = total + more
    return after, more - (after - total)


@triton.jit
def grown(weight, lost, own):
    """log(e^L + e^x), and the logit of the share of x; L is kept in two numbers, as its rounding would be a drift of
    the shares."""
    gain = (own - weight) - lost
    heavier = gain > 0.0
    rise = tl.where(heavier, 0.0, lost) + log_1_plus_share(exponential(-tl.abs(gain)))
    top = tl.where(heavier, own, weight)
    total = top + rise
    moved = total - top
    lost = (top - (total - moved)) + (rise - moved)
    seen = total > NO_WEIGHT
    return tl.where(seen, total, LOG_ZERO), tl.where(seen, lost, 0.0), gain


@triton.jit
def merged(weight, lost, mean, free, own, value, energy, rate, HAS_V: tl.constexpr, HAS_F: tl.constexpr):
    """A cell after what has the log-weight `own`: L in two numbers, mean and F; 0 of a cell without weight."""
    weight, lost, gain = grown(weight, lost, own)
    seen = weight > NO_WEIGHT
    if HAS_V:
        mean = tl.where(seen, merged_means(gain, mean, value), 0.0)
    if HAS_F:
        free = tl.where(seen, merged_energies(gain, free, energy, rate), 0.0)
    return weight, lost, mean, free


@triton.jit
def cells_at(weight, mean, free, at, both, HAS_V: tl.constexpr, HAS_F: tl.constexpr):
    """Cells from memory; 0 of what is not there."""
    log_weight = tl.load(weight + at, both, other=LOG_ZERO)
    value = tl.zeros(both.shape, tl.float32)
    energy = value
    if HAS_V:
        value = tl.load(mean + at, both, other=0.0)
    if HAS_F:
        energy = tl.load(free + at, both, other=0.0)
    return log_weight, value, energy


@triton.jit
def keep_cells(
    to_weight, to_mean, to_free, at, both, weight, mean, free, HAS_V: tl.constexpr, HAS_F: tl.constexpr
):  # fmt: skip
    """Cells to memory."""
    tl.store(to_weight + at, weight, both)
    if HAS_V:
        tl.store(to_mean + at, mean, both)
    if HAS_F:
        tl.store(to_free + at, free, both)


@triton.jit
def through_pieces(
    weight, lost, mean, free, rate, ends, at, every, count, there, HAS_V: tl.constexpr, HAS_F: tl.constexpr
):
    """Cells after the first `count` pieces of a row, of what each does to cells before it: in ends, 5 times `every`
    numbers a piece, stand how far they fall, in two numbers, and the cells of the piece's own tokens."""
    for _ in range(count):
        weight, lost = added(weight, lost, tl.load(ends + at, there, other=0.0))
        lost += tl.load(ends + at + every, there, other=0.0)
        own = cells_at(ends + 2 * every, ends + 3 * every, ends + 4 * every, at, there, HAS_V, HAS_F)
        weight, lost, mean, free = merged(weight, lost, mean, free, *own, rate, HAS_V, HAS_F)
        at += 5 * every
    return weight, lost, mean, free


@triton.jit
def keep_piece(ends, at, every, there, down, rest, weight, mean, free, HAS_V: tl.constexpr, HAS_F: tl.constexpr):
    """What `through_pieces` reads of a piece."""
    tl.store(ends + at, down, there)
    tl.store(ends + at + every, rest, there)
    keep_cells(ends + 2 * every, ends + 3 * every, ends + 4 * every, at, there, weight, mean, free, HAS_V, HAS_F)


@triton.jit
def share_apart(log_share, z):
    """e^{log_share} (e^z - 1), for log_share <= 0 and log_share + z <= 0."""
    share, near = exponential(log_share), tl.abs(z) < 1.0
    return tl.where(near, share * exp_minus_1(tl.where(near, z, 0.0)), exponential(log_share + z) - share)


@triton.jit
def log_shares(x, fall, before, after):
    """log own and log keep, of L before a token and after it."""
    seen = after > NO_WEIGHT
    kept = tl.where(seen & (before > NO_WEIGHT), before + fall - after, LOG_ZERO)
    return tl.where(seen, x - after, LOG_ZERO), kept


@triton.jit
def through_mean(share, keep, value, before, after, rho):
    """Of a cell's mean: what dx and da get of its gradient, and d mean before the token."""
    return share * (value - after) * rho, keep * (before - after) * rho, keep * rho


@triton.jit
def through_energy(log_share, log_keep, value, before, after, rate, gamma):
    """Of a cell's free energy: what dx, da and dbeta get of its gradient, df, and dF before the token."""
    above, below = value - after, before - after
    part, rest = exponential(log_share + rate * above) * gamma, exponential(log_keep + rate * below) * gamma
    slow = quotient(1.0, rate)
    tilt, gamma = (part * above + rest * below) * slow, gamma * slow
    return share_apart(log_share, rate * above) * gamma, share_apart(log_keep, rate * below) * gamma, tilt, part, rest


@triton.jit
def log_sum(scores):
    """log sum e^scores over the cells, and by how much the scores are below it; LOG_ZERO and -inf of no weight."""
    top = tl.max(scores, 0)
    total = top + logarithm(tl.sum(exponential(scores - top), 0))
    seen = total > NO_WEIGHT
    return tl.where(seen, total, LOG_ZERO), scores - tl.where(seen, total, float("inf"))


@triton.jit
def log_average(log_p, y):
    """log sum p e^y over the cells, of p that sum to 1."""
    seen = log_p > NO_WEIGHT
    top = tl.max(tl.where(seen, y, float("-inf")), 0)
    top = tl.where(top > float("-inf"), top, 0.0)
    z = tl.where(seen, y - top, 0.0)
    near, heights = tl.min(z, 0) >= -1.0, tl.where(seen, log_p + z, NO_WEIGHT)
    peak = tl.max(heights, 0)
    apart = exponential(log_p) * exp_minus_1(tl.maximum(z, -1.0))
    total = tl.sum(tl.where(near, apart, exponential(heights - peak)), 0)
    return top + tl.where(near, 0.0, peak) + log1p(tl.where(near, total, total - 1.0))
