"""Scores inside a chunk where every key channel decays by itself, and their gradient.

    A_ti = sum_c q_tc exp(sum_{i<r<=t} g_rc) k_ic        for i <= t, or i < t without the present token
    left_tc = q_tc exp(sum_{r<=t} g_rc)        kept_ic = k_ic exp(sum_{r>i} g_rc)        through_c = sum_r g_rc

Cut the chunk into blocks of 1, 2, 4, ... tokens. For every pair i < t there is exactly one of these sizes at which
i and t lie in neighbouring blocks, the first of even number. There, with s the first token of the later block, the
decay is the product of exp(sum_{i<r<s} g_rc) and exp(sum_{s<=r<=t} g_rc), so one matrix product per size gives all
pairs, and both factors are at most 1: no decay is ever divided by, and no difference of sums taken.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fem.ops.linear_attention.kernels.scores import allowed_pairs
from fem.ops.linear_attention.kernels.tiles import chunk_of, load_tile, store_tile


@triton.jit
def _sums(x, SIZE: tl.constexpr, REVERSE: tl.constexpr):
    """Running sums over the rows of each block of SIZE, with the present row."""
    if SIZE == 1:
        sums = x
    else:
        blocks = tl.reshape(x, (x.shape[0] // SIZE, SIZE, x.shape[1]))
        sums = tl.reshape(tl.cumsum(blocks, 1, reverse=REVERSE), x.shape)
    return sums


@triton.jit
def _decay_factors(step, following, local, SIZE: tl.constexpr):
    """What is left at t of what came before its block, and of i at the end of its block; `following` is g after i."""
    last = ((local + 1) % SIZE == 0)[:, None]
    return tl.exp(_sums(step, SIZE, False)), tl.exp(_sums(tl.where(last, 0.0, following), SIZE, True))


@triton.jit
def _neighbours(local, SIZE: tl.constexpr):
    block = local // SIZE
    return (block[:, None] % 2 == 1) & (block[:, None] == block[None, :] + 1)


@triton.jit
def channel_scores(
    q, k, g, left, kept, through, pairs, time,
    DK: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, SIZES: tl.constexpr, PRESENT: tl.constexpr,
):  # fmt: skip
    """q, k, g (B, T, H, DK); CHUNK = 2^SIZES. Out: left, kept (B, T, H, DK), through (B, H, N, DK), and pairs = A
    (B, H, N, CHUNK, CHUNK)."""
    place, of_row, end, heads = chunk_of(time, CHUNK)
    of_row *= DK
    local = tl.arange(0, CHUNK)
    a = tl.zeros([CHUNK, CHUNK], tl.float32)
    for start in range(0, DK, BLOCK):
        keys = start + tl.arange(0, BLOCK)
        q_tile = load_tile(q + of_row, local, keys, heads * DK, end, DK)
        k_tile = load_tile(k + of_row, local, keys, heads * DK, end, DK)
        step = load_tile(g + of_row, local, keys, heads * DK, end, DK)
        following = load_tile(g + of_row, local + 1, keys, heads * DK, end, DK)
        for level in tl.static_range(SIZES):
            since, until = _decay_factors(step, following, local, 1 << level)
            later, earlier = (q_tile * since).to(q_tile.dtype), (k_tile * until).to(q_tile.dtype)
            pair = tl.dot(later, tl.trans(earlier), input_precision="ieee")
            a += tl.where(_neighbours(local, 1 << level), pair, 0.0)
        if PRESENT:
            itself = tl.sum(q_tile.to(tl.float32) * k_tile.to(tl.float32), 1)
            a += tl.where(local[:, None] == local[None, :], itself[:, None], 0.0)
        since, until = _decay_factors(step, following, local, CHUNK)
        store_tile(left + of_row, local, keys, heads * DK, end, q_tile * since, DK)
        store_tile(kept + of_row, local, keys, heads * DK, end, k_tile * until, DK)
        tl.store(through + place * DK + keys, tl.sum(step, 0), mask=keys < DK)
    store_tile(pairs + place * CHUNK * CHUNK, local, local, CHUNK, CHUNK, a, CHUNK)


@triton.jit
def _through_decays(of_later, later, of_earlier, earlier, SIZE: tl.constexpr):
    """The gradient of g from those of products with the factors of one size of block."""
    of_until = of_earlier * earlier
    return _sums(of_later * later, SIZE, True) + (_sums(of_until, SIZE, False) - of_until)


@triton.jit
def channel_scores_gradients(
    q, k, g, dleft, dkept, dpairs, dthrough, dq, dk, dg, time,
    DK: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, SIZES: tl.constexpr, PRESENT: tl.constexpr,
):  # fmt: skip
    """dq, dk and dg of a block of key channels of one chunk from dleft, dkept, dpairs and dthrough (B, H, N, DK)."""
    place, of_row, end, heads = chunk_of(time, CHUNK)
    of_row *= DK
    local = tl.arange(0, CHUNK)
    of_pairs = load_tile(dpairs + place * CHUNK * CHUNK, local, local, CHUNK, CHUNK, CHUNK)
    of_pairs = tl.where(allowed_pairs(CHUNK, PRESENT), of_pairs, 0.0)
    of_itself = tl.sum(tl.where(local[:, None] == local[None, :], of_pairs, 0.0), 1)[:, None]
    for start in range(0, DK, BLOCK):
        keys = start + tl.arange(0, BLOCK)
        q_tile = load_tile(q + of_row, local, keys, heads * DK, end, DK)
        k_tile = load_tile(k + of_row, local, keys, heads * DK, end, DK)
        step = load_tile(g + of_row, local, keys, heads * DK, end, DK)
        following = load_tile(g + of_row, local + 1, keys, heads * DK, end, DK)
        since, until = _decay_factors(step, following, local, CHUNK)
        of_q = load_tile(dleft + of_row, local, keys, heads * DK, end, DK) * since
        of_k = load_tile(dkept + of_row, local, keys, heads * DK, end, DK) * until
        of_g = tl.load(dthrough + place * DK + keys, mask=keys < DK, other=0.0)[None, :]
        of_g += _through_decays(of_q, q_tile, of_k, k_tile, CHUNK)
        for level in tl.static_range(SIZES):
            since, until = _decay_factors(step, following, local, 1 << level)
            here = tl.where(_neighbours(local, 1 << level), of_pairs, 0.0).to(q_tile.dtype)
            later, earlier = (q_tile * since).to(q_tile.dtype), (k_tile * until).to(q_tile.dtype)
            of_later = tl.dot(here, earlier, input_precision="ieee") * since
            of_earlier = tl.dot(tl.trans(here), later, input_precision="ieee") * until
            of_g += _through_decays(of_later, q_tile, of_earlier, k_tile, 1 << level)
            of_q += of_later
            of_k += of_earlier
        store_tile(dq + of_row, local, keys, heads * DK, end, of_q + of_itself * k_tile, DK)
        store_tile(dk + of_row, local, keys, heads * DK, end, of_k + of_itself * q_tile, DK)
        store_tile(dg + of_row, local, keys, heads * DK, end, of_g, DK)
