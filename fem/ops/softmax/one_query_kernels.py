"""One query over cached keys and values by two Triton kernels: the cache is read once, and nothing is in doubt.

    m = max_i s_i            l = sum_i e^{s_i - m}                       mean = sum_i e^{s_i - m} v_i / l
    M = max_i (s_i + z_i)    E = sum_i e^{s_i + z_i - M}                 z_i = beta (f_i - c)
    F = c + (M - m + log(E / l)) / beta

c is the f of the last key, or 0. Where no |z_i| of a channel exceeds 1/4, F is c + log(1 + S / l) / beta instead, of
S = sum_i e^{s_i - m} (e^{z_i} - 1): that keeps the digits of F where beta is small. Keys and values that a query does
not see are passed over, whatever they hold. The first kernel reads a part of the keys a program, as flash decoding
does, and the second puts the parts together. Numbers are float32 in registers, and exponents powers of 2. Each row of a
block of keys has sums and maxima of its own until the last block, so that threads seldom wait for each other; raising a
maximum takes no exponential of its own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float
from torch import Tensor

from fem.ops.common.backend import on
from fem.ops.common.launch import cdiv, launched, next_power_of_2
from fem.ops.common.operator import operator
from fem.ops.common.read import Read
from fem.ops.common.triton_math import log_1_plus, power_of_2

NUMBERS = 1024  # values of a block of keys, 8 for each of 128 threads
PROGRAMS = 1024  # wanted on a card: eight for each of an H100's multiprocessors
LEAST_KEYS = 128  # of a program
MOST_PARTS = 64
STAGES = tl.constexpr(3)  # blocks of keys that are on their way
NARROW = tl.constexpr(0.25)
LOWEST = tl.constexpr(-3.4028234663852886e38)  # a maximum of nothing, from which -inf can be taken
LOG2_E, LN_2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)


@triton.jit
def raised(top, x):
    """The maximum of both, and relative to it what was 1 relative to top, and 2^x: one of the two is 1."""
    rise = x - top
    fraction = power_of_2(-tl.abs(rise))
    return tl.maximum(top, x), tl.where(rise > 0.0, fraction, 1.0), tl.where(rise > 0.0, 1.0, fraction)


@triton.jit
def load_added(mask, key, inside, MASKED: tl.constexpr):
    """What is added to the scores of keys, in bits, -inf where they are not seen. MASKED: 1: the mask adds it; 2: the
    mask tells which keys there are."""
    x = tl.load(mask + key, inside, other=0)
    if MASKED == 2:
        return tl.where(x != 0, 0.0, float("-inf"))
    else:
        return x.to(tl.float32) * LOG2_E


@triton.jit
def load_shift(f, mask, last, channel, there, MASKED: tl.constexpr):
    """c, the f of the last key, 0 where that is not seen."""
    shift = tl.load(f + channel, there, other=0.0).to(tl.float32)
    if MASKED:
        shift = tl.where(load_added(mask, last, last >= 0, MASKED) > float("-inf"), shift, 0.0)
    return shift


@launched(do_not_specialize=["time", "part"])
def read_part_kernel(
    q, k, v, f, beta, mask, parts, time, part, scale, q_batch, q_head, k_batch, k_head, v_batch, v_head,
    f_batch, f_head, mask_batch, mask_head,
    k_row: tl.constexpr, v_row: tl.constexpr, f_row: tl.constexpr, heads: tl.constexpr, GROUP: tl.constexpr,
    KEY: tl.constexpr, MEAN: tl.constexpr, FREE: tl.constexpr, SHARED: tl.constexpr, MASKED: tl.constexpr,
    KEYS: tl.constexpr, WIDE: tl.constexpr, COLUMNS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """The sums of `part` keys: parts (B, H, parts, 2 + MEAN + 3 FREE) holds m, l, l mean, M, E and S, which is infinite
    where some |z_i| is not narrow; m and M in bits. Heads that share keys run side by side, and find them cached."""
    row, step = tl.program_id(0), tl.program_id(1)
    batch, head, kv_head = (row // heads).to(tl.int64), row % heads, (row % heads) // GROUP
    wide, column, channel = tl.arange(0, WIDE), tl.arange(0, COLUMNS), tl.arange(0, CHANNELS)
    there = channel < FREE
    query = tl.load(q + batch * q_batch + head * q_head + wide, wide < KEY, other=0.0).to(tl.float32)
    query *= scale * LOG2_E
    keys, values = k + batch * k_batch + kv_head * k_head, v + batch * v_batch + kv_head * v_head
    free, own = f + batch * f_batch + kv_head * f_head, mask + batch * mask_batch + head * mask_head
    rate = tl.load(beta + kv_head * FREE + channel, there, other=1.0).to(tl.float32)
    shift = load_shift(free + (time - 1).to(tl.int64) * f_row, own, time - 1, channel, there, MASKED)
    top, weight = tl.full((KEYS,), LOWEST, tl.float32), tl.zeros((KEYS,), tl.float32)
    summed, peak = tl.zeros((KEYS, COLUMNS), tl.float32), tl.full((KEYS, CHANNELS), LOWEST, tl.float32)
    energy, small = tl.zeros((KEYS, CHANNELS), tl.float32), tl.zeros((KEYS, CHANNELS), tl.float32)
    stop = min(step * part + part, time)
    for start in tl.range(step * part, stop, KEYS, num_stages=STAGES):
        key = start + tl.arange(0, KEYS)
        token, inside = key.to(tl.int64)[:, None], (key < stop)[:, None]
        x = tl.load(keys + token * k_row + wide[None], inside & (wide < KEY)[None], other=0.0)
        if MEAN > 0:
            y = tl.load(values + token * v_row + column[None], inside & (column < MEAN)[None], other=0.0)
        if FREE > 0:
            if SHARED:
                e = y
            else:
                e = tl.load(free + token * f_row + channel[None], inside & there[None], other=0.0)
        score = tl.sum(x.to(tl.float32) * query[None], 1)
        if MASKED:
            added = load_added(own, key, key < stop, MASKED)
            seen = added > float("-inf")
            score = tl.where(seen, score + added, float("-inf"))
            if MEAN > 0:
                y = tl.where(seen[:, None], y, 0.0)
            if FREE > 0:
                e = tl.where(seen[:, None], e, 0.0)
        score = tl.where(key < stop, score, float("-inf"))
        top, fall, p = raised(top, score)
        weight = weight * fall + p
        if MEAN > 0:
            summed = summed * fall[:, None] + p[:, None] * y.to(tl.float32)
        if FREE > 0:
            z = rate[None] * (e.to(tl.float32) - shift[None])
            more = z * (1.0 + z * (1 / 2 + z * (1 / 6 + z * (1 / 24 + z * (1 / 120 + z * (1 / 720))))))  # e^z - 1
            more = tl.where(tl.abs(z) <= NARROW, more, tl.where(p > 0.0, float("inf"), 0.0)[:, None])
            small = tl.where((fall > 0.0)[:, None], small * fall[:, None], 0.0) + p[:, None] * more
            peak, fall_, term = raised(peak, z * LOG2_E + score[:, None])
            energy = energy * fall_ + term
    whole = tl.max(top, 0)
    share = tl.exp2(top - whole)
    to = parts + (row.to(tl.int64) * tl.num_programs(1) + step) * (2 + MEAN + 3 * FREE)
    tl.store(to, whole)
    tl.store(to + 1, tl.sum(share * weight, 0))
    if MEAN > 0:
        tl.store(to + 2 + column, tl.sum(share[:, None] * summed, 0), column < MEAN)
    if FREE > 0:
        to += 2 + MEAN + channel
        level = tl.max(peak, 0)
        tl.store(to, level, there)
        tl.store(to + FREE, tl.sum(energy * tl.exp2(peak - level[None]), 0), there)
        tl.store(to + 2 * FREE, tl.sum(tl.where((share > 0.0)[:, None], share[:, None] * small, 0.0), 0), there)


@launched(do_not_specialize=["time"])
def join_kernel(
    parts, f, beta, mask, mean, free_energy, time, count, f_batch, f_head, mask_batch, mask_head, f_row: tl.constexpr,
    heads: tl.constexpr, GROUP: tl.constexpr, MEAN: tl.constexpr, FREE: tl.constexpr, MASKED: tl.constexpr,
    PARTS: tl.constexpr, COLUMNS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """mean (B, H, MEAN) and F (B, H, FREE) of all keys from their parts; 0 where a query sees none."""
    row = tl.program_id(0)
    batch, kv_head = (row // heads).to(tl.int64), (row % heads) // GROUP
    step, column, channel = tl.arange(0, PARTS), tl.arange(0, COLUMNS), tl.arange(0, CHANNELS)
    exists, there = step < count, channel < FREE
    at = parts + (row.to(tl.int64) * count + step) * (2 + MEAN + 3 * FREE)
    tops = tl.load(at, exists, other=LOWEST)
    top = tl.max(tops, 0)
    share = tl.exp2(tops - top)
    weight = tl.sum(share * tl.load(at + 1, exists, other=0.0), 0)
    sees = weight > 0.0
    weight = tl.where(sees, weight, 1.0)
    both = exists[:, None] & (column < MEAN)[None]
    total = tl.sum(share[:, None] * tl.load(at[:, None] + 2 + column[None], both, other=0.0), 0)
    tl.store(mean + row.to(tl.int64) * MEAN + column, total / weight, column < MEAN)
    if FREE > 0:
        both, at = exists[:, None] & there[None], at[:, None] + 2 + MEAN + channel[None]
        peaks = tl.load(at, both, other=LOWEST)
        peak = tl.max(peaks, 0)
        energy = tl.sum(tl.exp2(peaks - peak[None]) * tl.load(at + FREE, both, other=0.0), 0)
        small = tl.load(at + 2 * FREE, both, other=0.0)
        small = tl.sum(tl.where((share > 0.0)[:, None], share[:, None] * small, 0.0), 0) / weight
        narrow = small < float("inf")
        large = LN_2 * (peak - top) + tl.log(tl.where(energy > 0.0, energy, 1.0) / weight)
        small = tl.where(narrow, small, 0.0)
        nats = tl.where(narrow, log_1_plus(small, tl.log(1.0 + small)), large)
        last, own = f + batch * f_batch + kv_head * f_head, mask + batch * mask_batch + row % heads * mask_head
        shift = load_shift(last + (time - 1).to(tl.int64) * f_row, own, time - 1, channel, there, MASKED)
        rate = tl.load(beta + kv_head * FREE + channel, there, other=1.0).to(tl.float32)
        tl.store(free_energy + row.to(tl.int64) * FREE + channel, tl.where(sees, shift + nats / rate, 0.0), there)


def _read(q, k, v, f, beta, mask, scale: float) -> tuple[Tensor, Tensor]:
    shared, f = f is None, v if f is None else f
    (batch, heads, width), (_, kv_heads, time, mean), free = q.shape, v.shape, beta.shape[-1]
    rows, wide, columns, channels = batch * heads, *(next_power_of_2(max(1, n)) for n in (width, mean, free))
    keys = max(4, (NUMBERS if free else 2 * NUMBERS) // max(wide, columns, channels))
    count = max(1, min(MOST_PARTS, PROGRAMS // rows, -(-time // LEAST_KEYS)))
    part = cdiv(cdiv(time, count), keys) * keys
    count = cdiv(time, part)
    parts = q.new_empty(rows, count, 2 + mean + 3 * free, dtype=torch.float32)
    out = [q.new_empty(batch, 1, heads, n) for n in (mean, free)]
    steps = (0, 0) if mask is None else mask.expand(batch, heads, time).stride()[:2]
    strides = [n for x in (q, k, v, f) for n in x.stride()[:2]]
    sizes = {"heads": heads, "GROUP": heads // kv_heads, "MEAN": mean, "FREE": free}
    sizes |= {"f_row": f.stride(2), "COLUMNS": columns, "CHANNELS": channels}
    sizes["MASKED"] = 0 if mask is None else 2 if mask.dtype == torch.bool else 1
    mask = q if mask is None else mask
    with on(q.device):
        read_part_kernel[rows, count](
            q, k, v, f, beta, mask, parts, time, part, scale, *strides, *steps, k_row=k.stride(2),
            v_row=v.stride(2), KEY=width, SHARED=shared, KEYS=keys, WIDE=wide, **sizes,
        )  # fmt: skip
        join_kernel[rows,](
            parts, f, beta, mask, *out, time, count, *f.stride()[:2], *steps, PARTS=next_power_of_2(count), **sizes
        )
    return tuple(out)


_operator = operator(
    "one_query(Tensor q, Tensor k, Tensor v, Tensor? f, Tensor beta, Tensor? mask, float scale) -> (Tensor, Tensor)",
    graphed=True,
)(_read)


@_operator.register_fake
def _(q, k, v, f, beta, mask, scale):
    return tuple(q.new_empty(q.shape[0], 1, q.shape[1], n) for n in (v.shape[-1], beta.shape[-1]))


def read_one_query(
    q: Float[Tensor, "b h dk"],
    k: Float[Tensor, "b hkv t dk"],
    v: Float[Tensor, "b hkv t dv"],
    f: Float[Tensor, "b hkv t df"],
    beta: Float[Tensor, "hkv df"],
    mask: Float[Tensor, "#b #hq t"] | Bool[Tensor, "#b #hq t"] | None,
    scale: float,
    shared: bool,
) -> Read:
    """`one_query_read` of tensors of at most 32 bits on a card, in their dtype. A boolean mask: which keys exist."""
    q, k, v, f = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v, f))
    mask = mask if mask is None or mask.stride(-1) == 1 else mask.contiguous()
    read = _read if type(q) is Tensor and not torch.compiler.is_compiling() else _operator
    return Read(*read(q, k, v, None if shared else f, beta.contiguous(), mask, scale))
