"""Cells of a state space as sums, each relative to a level of its own, as an online softmax keeps them: in Triton.

A cell that has read tokens with the log-weights x_i, which have decayed since, is

    e^M S = sum_i e^{x_i}        e^M P = sum_i e^{x_i} v_i        e^K E = sum_i e^{x_i} e^{beta (f_i - c)}

with c the row's first f. A decay lowers M and K. A token whose x is more than STEP above M makes it M, and so with
x + beta (f - c) and K. So S and E are at least 1 at any span, and no more than STEP above the number of tokens: nothing
overflows, nothing that counts is lost, and nothing has to be proven. The cell's log-weight, mean and free energy are

    L = M + log S        mean = P / S        F = c + Z / beta        Z = K - M + log(E / S)

A channel is narrow as long as no f has been more than NARROW nats from c. Then E sums e^{beta (f_i - c)} - 1, K is M,
Z is E / S and F = c + log(1 + Z) / beta, which keeps the digits of F where beta is small. A token alone has the Z of
its f.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fem.ops.common.merge_kernels import LOG_ZERO, NO_WEIGHT, added, log1p
from fem.ops.common.triton_math import exp_minus_1, exponential, logarithm, quotient

NARROW = tl.constexpr(1.0)
STEP = tl.constexpr(1.0)  # nats: levels that rose by less would multiply sums by 1 - 1e-6, which float32 has not


@triton.jit
def is_far(free, middle, rate):
    """Whether Z of F cannot be narrow: 1 or 0."""
    return tl.where(tl.abs(rate * (free - middle)) <= NARROW, 0.0, 1.0)


@triton.jit
def far_cells(weight, free, middle, rate):
    """`is_far` of cells; 0 of those without weight."""
    return tl.where(weight > NO_WEIGHT, is_far(free, middle[:, None], rate[:, None]), 0.0)


@triton.jit
def far_tokens(f, first, count, f_row, channel, live, middle, rate, ROWS: tl.constexpr):
    """Whether the f of a channel `is_far` in any of `count` tokens from `first` on."""
    far = tl.zeros((ROWS, channel.shape[0]), tl.float32)
    for start in range(0, count, ROWS):
        row = start + tl.arange(0, ROWS)
        there = (row < count)[:, None] & live[None]
        energy = tl.load(f + (first + row)[:, None] * f_row + channel[None], there, other=0.0).to(tl.float32)
        far = tl.maximum(far, tl.where(there, is_far(energy, middle[None], rate[None]), 0.0))
    return tl.max(far, 0)


@triton.jit
def ratio_of(free, middle, rate, narrow):
    """Z of F."""
    z = rate * (free - middle)
    return tl.where(narrow, exp_minus_1(tl.where(narrow, z, 0.0)), z)


@triton.jit
def ratios_of(weight, free, middle, rate, narrow):
    """Z of cells; 0 of those without weight."""
    return tl.where(weight > NO_WEIGHT, ratio_of(free, middle[:, None], rate[:, None], narrow[:, None]), 0.0)


@triton.jit
def free_of(z, middle, rate, narrow):
    """F of Z."""
    return middle + tl.where(narrow, log1p(tl.where(narrow, z, 0.0)), z) * quotient(1.0, rate)


@triton.jit
def steepness(z, narrow):
    """dZ / dF in units of beta."""
    return tl.where(narrow, 1.0 + z, 1.0)


@triton.jit
def sums_of(weight, lost, mean, z, narrow):
    """M, S, P, K and E of cells, each in two numbers."""
    none, above = tl.zeros(weight.shape, tl.float32), tl.where(narrow, 0.0, z)
    return weight, lost, none + 1.0, none, mean, none, weight + above, lost, tl.where(narrow, z, 1.0), none


@triton.jit
def widened(level, lost, s, s_lost, p, p_lost, peak, rest, e, e_lost, wide):
    """The sums of channels that are narrow no more where `wide` is 1: sums of e^{beta (f - c)}."""
    return level, lost, s, s_lost, p, p_lost, peak, rest, e + wide * s, e_lost + wide * s_lost


@triton.jit
def risen(level, lost, x):
    """A level, which is at least x - STEP now, and what its sum and an item of the log-weight x are multiplied by."""
    gain = (x - level) - lost
    higher = gain > STEP
    odds = exponential(tl.where(higher, -gain, gain))
    kept, entering = tl.where(higher, odds, 1.0), tl.where(higher, 1.0, odds)
    return tl.where(higher, x, level), tl.where(higher, 0.0, lost), kept, entering


@triton.jit
def with_token(
    level, lost, s, s_lost, p, p_lost, peak, rest, e, e_lost, fall, x, value, z, narrow, HAS_V: tl.constexpr,
    HAS_F: tl.constexpr,
):  # fmt: skip
    """The sums after a decay and a token of the log-weight x."""
    level, lost = added(level, lost, fall)
    level, lost, kept, entering = risen(level, lost, x)
    s, s_lost = added(kept * s, kept * s_lost, entering)
    if HAS_V:
        p, p_lost = added(kept * p, kept * p_lost, entering * value)
    if HAS_F:
        peak, rest = added(peak, rest, fall)
        peak, rest, kept, entering = risen(peak, rest, x + tl.where(narrow, 0.0, z))
        e, e_lost = added(kept * e, kept * e_lost, entering * tl.where(narrow, z, 1.0))
    return level, lost, s, s_lost, p, p_lost, peak, rest, e, e_lost


@triton.jit
def distance(level, lost, peak, rest):
    """K - M"""
    return (peak - level) + (rest - lost)


@triton.jit
def cells_of(
    level, lost, s, s_lost, p, p_lost, peak, rest, e, e_lost, narrow, HAS_V: tl.constexpr, HAS_F: tl.constexpr
):  # fmt: skip
    """L, mean and Z; 0 of a cell without weight."""
    seen, mean, z = level > NO_WEIGHT, p, e
    if HAS_V:
        mean = tl.where(seen, quotient(p, s), 0.0)
    if HAS_F:
        share = quotient(e, s)
        z = tl.where(narrow, share, distance(level, lost, peak, rest) + logarithm(tl.where(narrow, 1.0, share)))
        z = tl.where(seen, z, 0.0)
    return tl.where(seen, level + (lost + logarithm(s)), LOG_ZERO), mean, z


@triton.jit
def read_of(
    level, lost, s, s_lost, p, p_lost, peak, rest, e, e_lost, out, own, value, z, narrow, HAS_V: tl.constexpr,
    HAS_F: tl.constexpr,
):  # fmt: skip
    """L, mean and Z of a channel's cells together, with the log-weights `out` upon their own, and of the token itself
    with the log-weight `own`. The last two mean nothing where nothing weighs."""
    scores = level + out
    top = tl.maximum(tl.max(scores, 1), own)
    scores, own = scores - top[:, None], own - top
    share, own_share = exponential(scores), exponential(own)
    total, mean, ratio = tl.sum(share * s, 1) + own_share, z, z
    if HAS_V:
        mean = quotient(tl.sum(share * p, 1) + own_share * value, total)
    if HAS_F:
        scores, own = scores + distance(level, lost, peak, rest), own + tl.where(narrow, 0.0, z)
        height = tl.maximum(tl.max(scores, 1), own)
        energies = tl.sum(exponential(scores - height[:, None]) * e, 1)
        part = quotient(energies + exponential(own - height) * tl.where(narrow, z, 1.0), total)
        ratio = tl.where(narrow, part, height + logarithm(tl.where(narrow, 1.0, part)))
    return top + logarithm(total), mean, ratio


@triton.jit
def slopes(log_share, z, whole, narrow):
    """Of a part that has this share of a whole's weight, the derivatives of the whole's Z: by the Z of the part, by its
    log-weight, and by beta, times beta and of a channel that is not narrow."""
    share, apart = exponential(log_share), z - whole
    slope = exponential(log_share + tl.where(narrow, 0.0, apart))
    tilt = slope * apart
    return slope, tl.where(narrow, tilt, slope - share), tilt


@triton.jit
def bend(z):
    """z e^z - e^z + 1 for |z| <= 1, by its series, to float32's rounding."""
    total = 1 / 403200 + z * (1 / 3991680 + z * (1 / 43545600))
    total = 1 / 840 + z * (1 / 5760 + z * (1 / 45360 + z * total))
    return z * z * (1 / 2 + z * (1 / 3 + z * (1 / 8 + z * (1 / 30 + z * (1 / 144 + z * total)))))


@triton.jit
def bend_of(free, middle, rate, narrow):
    """`bend` of beta (F - c); 0 where the channel is not narrow. beta^2 (1 + Z) dF / dbeta is what the bend of a whole
    lacks to the mean of its parts' bends."""
    return bend(tl.where(narrow, rate * (free - middle), 0.0))
