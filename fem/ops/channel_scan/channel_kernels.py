"""The channel scan on a card: one Triton kernel forward and one backward, token after token, in logarithms.

The equations are those of `merge_kernels`: a channel is a cell, and no value is read on the host. A program has BLOCK
channels of a piece of a row's tokens. Where a row has several pieces, each kernel runs twice: first every piece says
what it does to what comes to it, then each begins with what the others have made of that. Tensors are (B, T, C); v or f
may have no channel. Tokens of a, v and f lie `*_row` numbers apart.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from fem.ops.common.cells import by_prefixes
from fem.ops.common.joined import by_tokens
from fem.ops.common.launch import cdiv, launched
from fem.ops.common.merge_kernels import (
    LOG_ZERO,
    added,
    block_and_row,
    cells_at,
    keep_cells,
    keep_piece,
    log_shares,
    merged,
    pieces_of,
    through_energy,
    through_mean,
    through_pieces,
)
from fem.ops.common.operator import again_differentiable
from fem.ops.common.own_backward import OwnBackward
from fem.ops.common.precision import double
from fem.ops.common.read import Terms
from fem.ops.common.triton_math import exponential

BLOCK = 32  # channels of a program
PROGRAMS = 4096  # of a warp each: a card has work for as many, as each waits for what it computed just before
SHORTEST = 64  # tokens of a piece: a program goes through the ends of the other pieces, too
Rows = Float[Tensor, "b t c"]


@triton.jit
def load_channels(
    score, a, v, f, token, column, live, a_row, v_row, f_row, HAS_A: tl.constexpr, HAS_V: tl.constexpr,
    HAS_F: tl.constexpr,
):  # fmt: skip
    """x, a, v and f of a token; 0 of what is not there."""
    none = tl.zeros(live.shape, tl.float32)
    fall, value, energy = none, none, none
    if HAS_A:
        fall = tl.load(a + token * a_row + column, live, other=0.0).to(tl.float32)
    if HAS_V:
        value = tl.load(v + token * v_row + column, live, other=0.0).to(tl.float32)
    if HAS_F:
        energy = tl.load(f + token * f_row + column, live, other=0.0).to(tl.float32)
    return tl.maximum(tl.load(score, live, other=LOG_ZERO).to(tl.float32), LOG_ZERO), fall, value, energy


@launched
def channel_kernel(
    x, a, v, f, beta, first_weight, first_mean, first_free, ends, weights, means, frees, T, C, pieces, length, x_row,
    x_token, x_channel, a_row, v_row, f_row, ENDS: tl.constexpr, HAS_A: tl.constexpr, HAS_V: tl.constexpr,
    HAS_F: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """L, mean and F after every token of a piece. ENDS: instead what a piece does to the cell before it, in ends,
    (B, pieces, 5, C)."""
    block, of_row = block_and_row(C, BLOCK)
    row, piece, column = (of_row // pieces).to(tl.int64), of_row % pieces, block * BLOCK + tl.arange(0, BLOCK)
    live, start, none = column < C, row * C + column, tl.zeros((BLOCK,), tl.float32)
    weight, lost, mean, free, rate = none + LOG_ZERO, none, none, none, none
    down, rest, end = none, none, row * pieces * (5 * C) + column
    if HAS_F:
        rate = tl.load(beta + column, live, other=1.0)
    if not ENDS:
        weight, mean, free = cells_at(first_weight, first_mean, first_free, start, live, HAS_V, HAS_F)
        weight, lost, mean, free = through_pieces(
            weight, lost, mean, free, rate, ends, end, C, piece, live, HAS_V, HAS_F
        )
    first = piece * length
    count = tl.minimum(T - first, length)
    score = x + row * x_row + column * x_channel
    token = row * T + first
    ahead = load_channels(
        score + first.to(tl.int64) * x_token, a, v, f, token, column, live, a_row, v_row, f_row, HAS_A, HAS_V, HAS_F
    )
    for t in range(count):
        own, fall, value, energy = ahead
        later = first + tl.minimum(t + 1, count - 1).to(tl.int64)  # tl.minimum: the interpreter counts in Python's
        ahead = load_channels(
            score + later * x_token, a, v, f, row * T + later, column, live, a_row, v_row, f_row, HAS_A, HAS_V, HAS_F
        )
        if HAS_A:
            weight, lost = added(weight, lost, fall)
            if ENDS:
                down, rest = added(down, rest, fall)
        weight, lost, mean, free = merged(weight, lost, mean, free, own, value, energy, rate, HAS_V, HAS_F)
        if not ENDS:
            at = (token + tl.maximum(t, 0)) * C + column
            keep_cells(weights, means, frees, at, live, weight, mean, free, HAS_V, HAS_F)
    if ENDS:
        keep_piece(ends, end + piece * (5 * C), C, live, down, rest, weight, mean, free, HAS_V, HAS_F)


@launched
def channel_backward_kernel(
    x, a, v, f, beta, first_weight, first_mean, first_free, ends, weights, means, frees, d_weights, d_means, d_frees,
    d_x, d_a, d_v, d_f, d_beta, d_first_weight, d_first_mean, d_first_free, T, C, pieces, length, x_row, x_token,
    x_channel, a_row, v_row, f_row, ENDS: tl.constexpr, HAS_A: tl.constexpr, HAS_V: tl.constexpr, HAS_F: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradients, from the last token of a piece to its first. d_beta has a part for each piece. ENDS: instead what a
    piece makes of the gradient behind it, in ends, (B, pieces, 7, C): it is linear in w, rho and gamma,

        w' = w_0 + P w + A rho + B gamma        rho' = rho_0 + P rho        gamma' = gamma_0 + G gamma
    """
    block, of_row = block_and_row(C, BLOCK)
    row, piece, column = (of_row // pieces).to(tl.int64), of_row % pieces, block * BLOCK + tl.arange(0, BLOCK)
    live, start, none = column < C, row * C + column, tl.zeros((BLOCK,), tl.float32)
    w, rho, gamma, rate_sum = none, none, none, none
    passed, passed_free, of_mean, of_free = none + 1.0, none + 1.0, none, none  # P, G, A, B
    rate = none
    if HAS_F:
        rate = tl.load(beta + column, live, other=1.0)
    end = ends + (row * pieces + pieces - 1) * (7 * C) + column
    if ENDS:
        end -= (pieces - 1 - piece) * (7 * C)
    else:
        for _ in range(pieces - 1 - piece):
            part = tl.load(end + 3 * C, live, other=0.0)
            w = tl.load(end, live, other=0.0) + part * w
            if HAS_V:
                w += tl.load(end + 5 * C, live, other=0.0) * rho
                rho = tl.load(end + C, live, other=0.0) + part * rho
            if HAS_F:
                w += tl.load(end + 6 * C, live, other=0.0) * gamma
                gamma = tl.load(end + 2 * C, live, other=0.0) + tl.load(end + 4 * C, live, other=0.0) * gamma
            end -= 7 * C
    first = piece * length
    count = tl.minimum(T - first, length)
    score = x + row * x_row + column * x_channel
    at = (row * T + first + count - 1) * C + column
    weight, mean, free = cells_at(weights, means, frees, at, live, HAS_V, HAS_F)
    for j in range(count):
        t = first + count - 1 - j
        inside = tl.minimum(t, 1) * C  # the memory that came in stands before the first token
        earlier, entered = column < inside, live & (column >= inside)
        token = tl.maximum(t, 0).to(tl.int64)
        own, fall, value, energy = load_channels(
            score + token * x_token, a, v, f, row * T + token, column, live, a_row, v_row, f_row, HAS_A, HAS_V, HAS_F
        )
        w += tl.load(d_weights + at, live, other=0.0)
        weight_before = tl.load(weights + at - C, earlier, other=0.0)
        weight_before += tl.load(first_weight + start, entered, other=0.0)
        log_own, log_keep = log_shares(own, fall, weight_before, weight)
        share, keep = exponential(log_own), exponential(log_keep)
        of_own, of_kept = w * share, w * keep
        if HAS_V:
            mean_before = tl.load(means + at - C, earlier, other=0.0)
            mean_before += tl.load(first_mean + start, entered, other=0.0)
            rho += tl.load(d_means + at, live, other=0.0)
            if ENDS:
                _own, more, _rho = through_mean(share, keep, value, mean_before, mean, passed)
                of_mean = of_mean * keep + more
            else:
                tl.store(d_v + at, share * rho, live)
            d_own, d_kept, rho = through_mean(share, keep, value, mean_before, mean, rho)
            of_own, of_kept, mean = of_own + d_own, of_kept + d_kept, mean_before
        if HAS_F:
            free_before = tl.load(frees + at - C, earlier, other=0.0)
            free_before += tl.load(first_free + start, entered, other=0.0)
            gamma += tl.load(d_frees + at, live, other=0.0)
            if ENDS:
                _own, more, _tilt, _part, passed_free = through_energy(
                    log_own, log_keep, energy, free_before, free, rate, passed_free
                )
                of_free = of_free * keep + more
            d_own, d_kept, tilt, part, gamma = through_energy(log_own, log_keep, energy, free_before, free, rate, gamma)
            if not ENDS:
                tl.store(d_f + at, part, live)
            of_own, of_kept, free = of_own + d_own, of_kept + d_kept, free_before
            rate_sum += tilt
        if not ENDS:
            tl.store(d_x + at, of_own, live)
            if HAS_A:
                tl.store(d_a + at, of_kept, live)
        passed *= keep
        w, weight = of_kept, weight_before
        at -= C
    if ENDS:
        tl.store(end, w, live)
        tl.store(end + C, rho, live)
        tl.store(end + 2 * C, gamma, live)
        tl.store(end + 3 * C, passed, live)
        tl.store(end + 4 * C, passed_free, live)
        tl.store(end + 5 * C, of_mean, live)
        tl.store(end + 6 * C, of_free, live)
    else:
        if HAS_F:
            tl.store(d_beta + (row * pieces + piece) * C + column, rate_sum, live)
        if piece == 0:
            keep_cells(d_first_weight, d_first_mean, d_first_free, start, live, w, rho, gamma, HAS_V, HAS_F)


def channels_by_kernels(
    memory: Terms, x: Rows, a: Rows | None, v: Rows, f: Rows, beta: Float[Tensor, " c"]
) -> tuple[Terms, Terms]:
    """The read after every token, and the memory after the last, (B, 1, C), in float32."""
    read = Terms(*_CHANNEL_READ((x, a, v, f, beta, *memory)))
    return read, Terms(*(part[:, -1:] for part in read))


class _ChannelRead(OwnBackward):
    name, count, settings = "channel_read", 3, ""
    tensors = "Tensor x, Tensor? a, Tensor v, Tensor f, Tensor beta, Tensor log_weight, Tensor mean, Tensor free_energy"

    def forward(self, differentiated, tensors):
        x, a, v, f, *others = tensors
        beta, *memory = (part.contiguous() for part in others)
        out = self.empty_results(tensors)
        grid, pieces, given, sizes, flags = _launch(x, a, v, f)
        ends = beta.new_empty(len(x), pieces, 5, x.shape[2])
        for of_ends in (True, False)[pieces == 1 :]:
            channel_kernel[grid](*given, beta, *memory, ends, *out, *sizes, ENDS=of_ends, **flags)
        return out

    def empty_results(self, tensors):
        x, _, v, f, beta, *_ = tensors
        return [beta.new_empty(*x.shape[:2], part.shape[-1]) for part in (x, v, f)]

    def backward(self, grads, tensors, kept):
        x, a, v, f, *others = tensors
        beta, *memory = (part.contiguous() for part in others)
        grads = [torch.zeros_like(y) if d is None else d.contiguous() for d, y in zip(grads, kept)]
        grid, pieces, given, sizes, flags = _launch(x, a, v, f)
        found = [part.new_empty(part.shape) for part in (x, x, v, f, beta.expand(len(x) * pieces, -1), *memory)]
        ends = beta.new_empty(len(x), pieces, 7, x.shape[2])
        for of_ends in (True, False)[pieces == 1 :]:
            channel_backward_kernel[grid](
                *given, beta, *memory, ends, *kept, *grads, *found, *sizes, ENDS=of_ends, **flags
            )  # fmt: skip
        found[4] = found[4].sum(0)
        return found if a is not None else [found[0], *found[2:]]

    def again(self, grads, tensors):
        return again_differentiable(_by_definition, tensors, grads)


def _launch(x: Tensor, a: Tensor | None, v: Tensor, f: Tensor) -> tuple[tuple[int], int, list[Tensor], list[int], dict]:
    """Of either kernel the grid, the pieces of a row, x, a, v and f, sizes and flags. Only x may be one number for all
    tokens."""
    (batch, time, width), blocks = x.shape, cdiv(x.shape[2], BLOCK)
    pieces, length = pieces_of(time, PROGRAMS // (batch * blocks), SHORTEST)
    flags = {"HAS_A": a is not None, "HAS_V": v.shape[-1] > 0, "HAS_F": f.shape[-1] > 0, "BLOCK": BLOCK, "num_warps": 1}
    (v, v_row), (f, f_row), (a, a_row) = by_tokens(v), by_tokens(f), (x, 0) if a is None else by_tokens(a)
    sizes = [time, width, pieces, length, *x.stride(), a_row, v_row, f_row]
    return (blocks * batch * pieces,), pieces, [x, a, v, f], sizes, flags


def _by_definition(x, a, v, f, beta, *memory):
    """In float64, whose digits second derivatives need."""
    x, a, v, f, beta, *memory = double(x, a, v, f, beta, *memory)
    return by_prefixes(Terms(*memory), x, a, v, f, beta)[0]


_CHANNEL_READ = _ChannelRead()
