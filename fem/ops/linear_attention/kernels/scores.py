"""Scores inside a chunk where the key channels of a head decay alike, or not at all, and their gradient.

    A_ti = sum_c q_tc k_ic D_ti,  D_ti = exp(sum_{i<r<=t} g_r)        for i <= t, or i < t without the present token
    left_tc = q_tc exp(sum_{r<=t} g_r)        kept_ic = k_ic exp(sum_{r>i} g_r)        through = sum_r g_r

Sums run over the chunk, and over segments as they are: no decay is ever divided by, and no difference of sums taken.
Without decays left is q and kept is k.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fem.ops.linear_attention.kernels.tiles import chunk_of, load_tile, store_tile


@triton.jit
def allowed_pairs(CHUNK: tl.constexpr, PRESENT: tl.constexpr):
    """Which tokens i, in columns, a token t may see."""
    local = tl.arange(0, CHUNK)
    if PRESENT:
        seen = local[:, None] >= local[None, :]
    else:
        seen = local[:, None] > local[None, :]
    return seen


@triton.jit
def _decays(g, heads, end, CHUNK: tl.constexpr):
    """The logarithms of D, and of the decays up to and after each token."""
    local = tl.arange(0, CHUNK)
    step = tl.load(g + local * heads, mask=local < end, other=0.0)
    later = local[:, None] > local[None, :]
    segments = tl.cumsum(tl.where(later, step[:, None], 0.0), 0)
    until = tl.sum(tl.where(later, step[:, None], 0.0), 0)
    return segments, tl.cumsum(step, 0), until


@triton.jit
def scores(
    q, k, g, left, kept, through, pairs, time,
    DK: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, PRESENT: tl.constexpr,
):  # fmt: skip
    """q, k (B, T, H, DK), g (B, T, H) or None. Out: left, kept (B, T, H, DK) and through (B, H, N) if there is g;
    pairs = A (B, H, N, CHUNK, CHUNK)."""
    place, of_row, end, heads = chunk_of(time, CHUNK)
    local = tl.arange(0, CHUNK)
    if g is not None:
        segments, since, until = _decays(g + of_row, heads, end, CHUNK)
        tl.store(through + place, tl.min(since, 0))
    a = tl.zeros([CHUNK, CHUNK], tl.float32)
    for start in range(0, DK, BLOCK):
        keys = start + tl.arange(0, BLOCK)
        q_tile = load_tile(q + of_row * DK, local, keys, heads * DK, end, DK)
        k_tile = load_tile(k + of_row * DK, local, keys, heads * DK, end, DK)
        a = tl.dot(q_tile, tl.trans(k_tile), a, input_precision="ieee")
        if g is not None:
            store_tile(left + of_row * DK, local, keys, heads * DK, end, q_tile * tl.exp(since)[:, None], DK)
            store_tile(kept + of_row * DK, local, keys, heads * DK, end, k_tile * tl.exp(until)[:, None], DK)
    if g is not None:
        a *= tl.exp(segments)
    a = tl.where(allowed_pairs(CHUNK, PRESENT), a, 0.0)
    store_tile(pairs + place * CHUNK * CHUNK, local, local, CHUNK, CHUNK, a, CHUNK)


@triton.jit
def scores_gradients(
    q, k, g, pairs, dleft, dkept, dpairs, dthrough, dq, dk, dg, time,
    DK: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, PRESENT: tl.constexpr,
):  # fmt: skip
    """dq, dk and dg of one chunk from dleft, dkept, dpairs and dthrough (B, H, N, DK)."""
    place, of_row, end, heads = chunk_of(time, CHUNK)
    local = tl.arange(0, CHUNK)
    of_pairs = load_tile(dpairs + place * CHUNK * CHUNK, local, local, CHUNK, CHUNK, CHUNK)
    of_pairs = tl.where(allowed_pairs(CHUNK, PRESENT), of_pairs, 0.0)
    if g is not None:
        segments, since, until = _decays(g + of_row, heads, end, CHUNK)
        a = load_tile(pairs + place * CHUNK * CHUNK, local, local, CHUNK, CHUNK, CHUNK).to(tl.float32)
        across = tl.where(local[:, None] > local[None, :], of_pairs * a, 0.0)
        of_pairs *= tl.exp(segments)
        of_since, of_until = tl.zeros([CHUNK], tl.float32), tl.zeros([CHUNK], tl.float32)
    of_pairs = of_pairs.to(q.dtype.element_ty)
    for start in range(0, DK, BLOCK):
        keys = start + tl.arange(0, BLOCK)
        q_tile = load_tile(q + of_row * DK, local, keys, heads * DK, end, DK)
        k_tile = load_tile(k + of_row * DK, local, keys, heads * DK, end, DK)
        of_left = load_tile(dleft + of_row * DK, local, keys, heads * DK, end, DK)
        of_kept = load_tile(dkept + of_row * DK, local, keys, heads * DK, end, DK)
        if g is not None:
            of_left *= tl.exp(since)[:, None]
            of_kept *= tl.exp(until)[:, None]
            of_since += tl.sum(of_left * q_tile, 1)
            of_until += tl.sum(of_kept * k_tile, 1)
        of_q = tl.dot(of_pairs, k_tile, of_left, input_precision="ieee")
        of_k = tl.dot(tl.trans(of_pairs), q_tile, of_kept, input_precision="ieee")
        store_tile(dq + of_row * DK, local, keys, heads * DK, end, of_q, DK)
        store_tile(dk + of_row * DK, local, keys, heads * DK, end, of_k, DK)
    if g is not None:
        keys = tl.arange(0, KEYS)
        of_g = tl.sum(tl.load(dthrough + place * DK + keys, mask=keys < DK, other=0.0), 0)
        earlier = local[None, :] < local[:, None]
        of_later = tl.cumsum(across, 0, reverse=True) + of_until[None, :]  # at (r, i): what passes from i through r
        of_g += tl.sum(tl.where(earlier, of_later, of_since[None, :]), 1)
        tl.store(dg + of_row + local * heads, of_g, mask=local < end)
