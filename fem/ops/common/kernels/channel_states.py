"""One step of the two streams of a channel: sums of any magnitude, relative to a peak that follows them down.

    S e^m = sum_i exp(x_i + sum_{i<r} a_r) (1, v_i)        E e^(n + beta c) = sum_i exp(x_i + sum_{i<r} a_r + beta v_i)

A decay shrinks the sums until they are faint, and then lowers the peak; a heavier token raises it. So the peaks are not
the running maxima of `fem.ops.common.scaled_sums`, but S e^m is the same. That of the energies is kept as the
log-weight n and the value c of a token, so that beta multiplies differences of values alone. An empty stream has the
lowest peak and the sums (1, 0). The share of every token in the sum is kept for the gradients.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fem.ops.common.kernels.decay_steps import decay_of, decayed, load_channels
from fem.ops.common.kernels.tiles import LN_2, NEARLY_NOTHING, NOTHING

FAR = tl.constexpr(-16.0)  # a stronger decay lowers the peak at once, instead of the sums
FAINT = tl.constexpr(2.0**-20)  # a smaller total is multiplied by LIFT, and its peak lowered
LIFT = tl.constexpr(2.0**20)
LIFT_NATS = tl.constexpr(13.862943611198906)  # log(LIFT)
EMPTY = tl.constexpr(2.0)  # stored as the share where the stream is still empty


@triton.jit
def lowered(peak, total, log_decay):
    """The peak and the total after a decay, and stays, factor and scale, by which the stream's other sums decay."""
    far = log_decay < FAR
    stays, factor = decay_of(tl.where(far, 0.0, log_decay))
    peak = tl.maximum(tl.where(far, peak + log_decay, peak), NOTHING)
    total = decayed(total, stays, factor)
    faint = total < FAINT
    scale = tl.where(faint, LIFT, 1.0)
    return tl.where(faint, peak - LIFT_NATS, peak), total * scale, stays, factor, scale


@triton.jit
def share_of(own, before, peak):
    """own / (own + before). Above 1/2 it is minus the share of `before`: near 1, float32 would lose its digits."""
    per_total = 1.0 / (own + before)
    share = tl.where(own > before, -tl.maximum(before * per_total, 1e-37), own * per_total)
    return tl.where(peak < NEARLY_NOTHING, EMPTY, share)


@triton.jit
def add_weights(peak, total, weighted, log_decay, x, own, own_weighted):
    """m, S(1) and S(v) after own e^x and own_weighted e^x were added, and the share of the former in S(1)."""
    if log_decay is not None:
        peak, total, stays, factor, scale = lowered(peak, total, log_decay)
        weighted = decayed(weighted, stays, factor) * scale
    gain = x - peak
    fall = tl.exp(-tl.abs(gain))
    higher = gain > 0
    peak, shrink, own_scale = tl.where(higher, x, peak), tl.where(higher, fall, 1.0), tl.where(higher, 1.0, fall)
    total, own = total * shrink, own * own_scale
    some = peak > NEARLY_NOTHING
    weighted = tl.where(some, weighted * shrink + own_weighted * own_scale, 0.0)
    return peak, tl.where(some, total + own, 1.0), weighted, share_of(own, total, peak)


@triton.jit
def add_energy(peak, at, energy, log_decay, rate, x, v, own):
    """n, c and E after own e^(x + rate v) was added, and its share in E."""
    if log_decay is not None:
        peak, energy, _, _, _ = lowered(peak, energy, log_decay)
    gain = (x - peak) + rate * (v - at)
    fall = tl.exp(-tl.abs(gain))
    higher = gain > 0
    peak, at = tl.where(higher, x, peak), tl.where(higher, v, at)
    energy, own = energy * tl.where(higher, fall, 1.0), own * tl.where(higher, 1.0, fall)
    some = peak > NEARLY_NOTHING
    return peak, tl.where(some, at, 0.0), tl.where(some, energy + own, 1.0), share_of(own, energy, peak)


@triton.jit
def at_least_half(peak, total):
    """The peak lowered until the total is at least 1/2, as `scaled_sums` wants it, and the factor of the sums."""
    octaves = tl.minimum(tl.floor(tl.log2(total)) + 1.0, 0.0)
    return peak + octaves * LN_2, tl.exp2(-octaves)


@triton.jit
def part_of(share):
    """The share as a number between 0 and 1."""
    return tl.where(share < 0, 1.0 + share, tl.where(share < EMPTY, share, 0.0))


@triton.jit
def past_of(r, share):
    """(1 - share) r: the part of a gradient that flows on to earlier tokens."""
    return tl.where(share < 0, -share * r, tl.where(share < EMPTY, r - share * r, 0.0))


@triton.jit
def token(x, v, place, inside):
    """x (None: 0) and v of one token, in float32."""
    weight = tl.zeros(inside.shape, tl.float32)
    if x is not None:
        weight = load_channels(x + place, inside)
    return weight, load_channels(v + place, inside)
