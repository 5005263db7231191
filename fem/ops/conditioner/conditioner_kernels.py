"""The conditioner in Triton: two kernels forward and two backward, of which the first ones only sum up chunks; and one
each way for the norm before its map, [f, u, a] = W LayerNorm(x) + b.

    h~_t = e^{-s_t} h~_{t-1} + u_t    s = softplus(f)    h_t = SiLU(length l2norm(softplus(a_t))) * LayerNorm(h~_t)

A program has one chunk of a row's tokens in all C channels, and goes through it by tiles of TIME tokens. What enters
a chunk is a sum over all earlier ones, of their ends S_m and the logarithms L_k of their whole decays,

    h~ = S_{n-1} + sum_{m < n} exp(sum_{m <= k < n} L_k) S_{m-1}        S_{-1} the state before the first token

so nothing is divided by a decay, the rounding of factors near 1 does not pile up, and no program waits for another. The
gradient of h~ runs the other way by the same formula. Numbers are float32 in registers. Without `bends` there is no
SiLU.

[f, u, a], `projected` (B, T, 3 C), is contiguous, as are keep and start (B, T), one byte each, or None. `out` and its
gradient are columns of tensors whose rows are `*_row` apart. Of the gradients of weights and biases every program
writes its part, a row of `parts`: of LayerNorm's weight and bias and of the biases of f, u and a, C each, and of what
`normalize_backward_kernel` adds.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fem.ops.common.triton_math import exact_softplus

LEAST_LENGTH = tl.constexpr(1e-12)  # of `torch.nn.functional.normalize`


@triton.jit
def _then(decay, u, next_decay, next_u):
    return decay * next_decay, next_decay * u + next_u


@triton.jit
def _log_decays(projected, keep, start, batch, row, time, inside, column, width: tl.constexpr):
    """Logarithms of the decays into tokens: -inf where a document starts, 0 for a masked token."""
    at = batch.to(tl.int64) * time + row
    there = inside[:, None] & (column < width)[None]
    f = tl.load(projected + at[:, None] * (3 * width) + column[None], there, other=0.0).to(tl.float32)
    kept = inside
    if keep is not None:
        kept &= tl.load(keep + at, inside, other=0) != 0
    log_decay = tl.where(kept[:, None], -exact_softplus(f), 0.0)
    if start is not None:
        starts = tl.load(start + at, inside, other=0) != 0
        log_decay = tl.where(starts[:, None], float("-inf"), log_decay)
    return log_decay, f, kept


@triton.jit
def _scanned(projected, keep, start, batch, row, time, inside, column, width: tl.constexpr):
    """Decays of tokens, as logarithms, and from the first of them: as factors, and what they add to the state."""
    log_decay, _, kept = _log_decays(projected, keep, start, batch, row, time, inside, column, width)
    at = batch.to(tl.int64) * time + row
    there = kept[:, None] & (column < width)[None]
    u = tl.load(projected + at[:, None] * (3 * width) + width + column[None], there, other=0.0).to(tl.float32)
    decay, state = tl.associative_scan((tl.exp(log_decay), u), 0, _then)
    return log_decay, decay, state


@triton.jit
def _row_at(x, index, of):
    """Row `of` of x."""
    return tl.sum(tl.where((index == of)[:, None], x, 0.0), 0)


@triton.jit
def sum_chunks_kernel(
    projected, keep, start, summaries, time, chunks, tiles, width: tl.constexpr, TIME: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """summaries (B, chunks, 2, C): the logarithm of a chunk's decay, and the state at its end without what entered."""
    chunk, batch = tl.program_id(0) % chunks, tl.program_id(0) // chunks
    index, column = tl.arange(0, TIME), tl.arange(0, COLUMNS)
    log_total, end = tl.zeros((COLUMNS,), tl.float32), tl.zeros((COLUMNS,), tl.float32)
    for tile in range(tiles):
        row = (chunk * tiles + tile) * TIME + index
        log_decay, _, state = _scanned(projected, keep, start, batch, row, time, row < time, column, width)
        total = tl.sum(log_decay, 0)
        end = tl.exp(total) * end + _row_at(state, index, TIME - 1)
        log_total += total
    at = summaries + (batch.to(tl.int64) * chunks + chunk) * (2 * width) + column
    tl.store(at, log_total, column < width)
    tl.store(at + width, end, column < width)


@triton.jit
def _gathered(
    summaries, outer, batch, chunk, chunks, column, width: tl.constexpr, STEP: tl.constexpr, CHUNKS: tl.constexpr
):
    """What reaches a chunk from the chunks before it (STEP 1) or behind it (-1), and from beyond them all, `outer`."""
    there = column < width
    row = summaries + batch.to(tl.int64) * chunks * (2 * width) + column
    if STEP == 1:
        count = chunk
    else:
        count = chunks - 1 - chunk
    nearest = row + (chunk - STEP) * (2 * width)
    reached = tl.load(nearest + width, column < tl.where(count > 0, width, 0), other=0.0)
    log_total = tl.zeros_like(reached)
    for first in range(0, count, CHUNKS):
        away = first + tl.arange(0, CHUNKS)
        at = nearest[None] + away[:, None] * (-STEP * 2 * width)
        log_decay = tl.load(at, (away < count)[:, None] & there[None], other=0.0)
        at += (1 - 2 * STEP) * width
        beyond = tl.load(at, (away + 1 < count)[:, None] & there[None], other=0.0)
        reached += tl.sum(tl.exp(tl.cumsum(log_decay, 0) + log_total[None]) * beyond, 0)
        log_total += tl.sum(log_decay, 0)
    if outer is not None:
        far = tl.load(outer + batch.to(tl.int64) * width + column, there, other=0.0).to(tl.float32)
        reached += tl.exp(log_total) * far
    return reached


@triton.jit
def _normed(state, there, width: tl.constexpr, eps):
    """LayerNorm without weight and bias, and one over the deviation."""
    centred = tl.where(there, state - tl.sum(tl.where(there, state, 0.0), 1)[:, None] / width, 0.0)
    rate = tl.rsqrt(tl.sum(centred * centred, 1) / width + eps)[:, None]
    return centred * rate, rate


@triton.jit
def _unit(a, there, length: tl.constexpr):
    """y = length l2norm(softplus(a)), and one over what it is divided by."""
    s = tl.where(there, exact_softplus(a), 0.0)
    rate = 1.0 / tl.maximum(tl.sqrt(tl.sum(s * s, 1)), LEAST_LENGTH)[:, None]
    return s * (rate * length), rate


@triton.jit
def condition_kernel(
    projected, weight, bias, keep, start, hidden, summaries, out, last, starts, time, chunks, tiles, out_row, eps,
    length: tl.constexpr, bends: tl.constexpr, width: tl.constexpr, TIME: tl.constexpr, COLUMNS: tl.constexpr,
    CHUNKS: tl.constexpr,
):  # fmt: skip
    """h (B, T, C), the last state (B, C), and the states that enter tiles, (B, all tiles, C)."""
    chunk, batch = tl.program_id(0) % chunks, tl.program_id(0) // chunks
    index, column = tl.arange(0, TIME), tl.arange(0, COLUMNS)
    channel = column < width
    scale, shift = tl.load(weight + column, channel, other=0.0), tl.load(bias + column, channel, other=0.0)
    scale, shift = scale.to(tl.float32)[None], shift.to(tl.float32)[None]
    entering = _gathered(summaries, hidden, batch, chunk, chunks, column, width, 1, CHUNKS)
    every = tl.cdiv(time, TIME)
    for step in range(tiles):
        tile = chunk * tiles + step
        known = column < tl.where(tile < every, width, 0)
        tl.store(starts + (batch.to(tl.int64) * every + tile) * width + column, entering, known)
        row = tile * TIME + index
        _, decay, state = _scanned(projected, keep, start, batch, row, time, row < time, column, width)
        state += decay * entering[None]
        entering = _row_at(state, index, TIME - 1)
        there = (row < time)[:, None] & channel[None]
        at = (batch.to(tl.int64) * time + row)[:, None]
        a = tl.load(projected + at * (3 * width) + 2 * width + column[None], there, other=0.0).to(tl.float32)
        y, _ = _unit(a, there, length)
        normed, _ = _normed(state, there, width, eps)
        if bends:
            y *= tl.sigmoid(y)
        tl.store(out + at * out_row + column[None], y * (normed * scale + shift), there)
    if chunk == chunks - 1:
        tl.store(last + batch.to(tl.int64) * width + column, entering, channel)


@triton.jit
def condition_backward_kernel(
    grad, projected, weight, bias, keep, start, starts, d_state, d_projected, summaries, parts,
    time, chunks, tiles, grad_row, parts_row, eps,
    length: tl.constexpr, bends: tl.constexpr, width: tl.constexpr, TIME: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """d h~_t as far as it comes through h_t, float32 (B, T, C); da; what a chunk gives of it to the state that enters
    it, with its decay, (B, chunks, 2, C); and its parts of the gradients of weight, bias and the bias of a."""
    chunk, batch = tl.program_id(0) % chunks, tl.program_id(0) // chunks
    index, column = tl.arange(0, TIME), tl.arange(0, COLUMNS)
    channel = column < width
    scale, shift = tl.load(weight + column, channel, other=0.0), tl.load(bias + column, channel, other=0.0)
    scale, shift = scale.to(tl.float32)[None], shift.to(tl.float32)[None]
    zeros = tl.zeros((COLUMNS,), tl.float32)
    d_scale, d_shift, d_bias, log_total, given = zeros, zeros, zeros, zeros, zeros
    every = tl.cdiv(time, TIME)
    for step in range(tiles):
        tile = chunk * tiles + step
        known = column < tl.where(tile < every, width, 0)
        entering = tl.load(starts + (batch.to(tl.int64) * every + tile) * width + column, known, other=0.0)
        row = tile * TIME + index
        log_decay, decay, state = _scanned(projected, keep, start, batch, row, time, row < time, column, width)
        there = (row < time)[:, None] & channel[None]
        normed, rate = _normed(state + decay * entering[None], there, width, eps)
        at = (batch.to(tl.int64) * time + row)[:, None] * width
        a = tl.load(projected + 3 * at + 2 * width + column[None], there, other=0.0).to(tl.float32)
        y, rate_of_a = _unit(a, there, length)
        gate, slope_of_gate = y, tl.full(y.shape, 1.0, tl.float32)
        if bends:
            gate = y * tl.sigmoid(y)
            slope_of_gate = tl.sigmoid(y) * (1.0 + y * (1.0 - tl.sigmoid(y)))
        d_h = grad + (batch.to(tl.int64) * time + row)[:, None] * grad_row + column[None]
        d_h = tl.load(d_h, there, other=0.0).to(tl.float32)

        d_affine = d_h * gate
        d_scale += tl.sum(d_affine * normed, 0)
        d_shift += tl.sum(d_affine, 0)
        d_normed = d_affine * scale
        slope = tl.sum(d_normed * normed, 1)[:, None] / width
        d_x = rate * (d_normed - tl.sum(d_normed, 1)[:, None] / width - normed * slope)
        tl.store(d_state + at + column[None], d_x, there)
        given += tl.exp(log_total) * tl.sum(tl.where(there, decay * d_x, 0.0), 0)
        log_total += tl.sum(log_decay, 0)

        d_y = d_h * (normed * scale + shift) * slope_of_gate
        along = tl.where(rate_of_a * LEAST_LENGTH < 1.0, tl.sum(d_y * y, 1)[:, None] / (length * length), 0.0)
        d_a = tl.where(there, (d_y - y * along) * (rate_of_a * length) * tl.sigmoid(a), 0.0)
        d_bias += tl.sum(d_a, 0)
        tl.store(d_projected + 3 * at + 2 * width + column[None], d_a, there)
    at = tl.program_id(0).to(tl.int64) * (2 * width) + column
    tl.store(summaries + at, log_total, channel)
    tl.store(summaries + at + width, given, channel)
    part = parts + tl.program_id(0).to(tl.int64) * parts_row + column
    tl.store(part, d_scale, channel)
    tl.store(part + width, d_shift, channel)
    tl.store(part + 4 * width, d_bias, channel)


@triton.jit
def state_backward_kernel(
    projected, keep, start, starts, d_state, d_last, summaries, d_projected, d_hidden, parts, time, chunks, tiles,
    parts_row, width: tl.constexpr, TIME: tl.constexpr, COLUMNS: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """du_t = dh~_t + e^{-s_{t+1}} du_{t+1},    df_t = -sigmoid(f_t) e^{-s_t} h~_{t-1} du_t, and d h~_0; and the
    parts of the gradients of the biases of f and u."""
    chunk, batch = tl.program_id(0) % chunks, tl.program_id(0) // chunks
    index, column = tl.arange(0, TIME), tl.arange(0, COLUMNS)
    channel = column < width
    d_f_sum, d_u_sum = tl.zeros((COLUMNS,), tl.float32), tl.zeros((COLUMNS,), tl.float32)
    reached = _gathered(summaries, d_last, batch, chunk, chunks, column, width, -1, CHUNKS)
    every = tl.cdiv(time, TIME)
    for step in range(tiles):
        tile = chunk * tiles + tiles - 1 - step
        row = tile * TIME + index
        there = (row < time)[:, None] & channel[None]
        at = (batch.to(tl.int64) * time + row)[:, None] * width

        behind = (index < TIME - 1) & (row + 1 < time)
        log_next, _, _ = _log_decays(projected, keep, start, batch, row + 1, time, behind, column, width)
        d_u = tl.load(d_state + at + column[None], there, other=0.0)
        factor, d_u = tl.associative_scan((tl.exp(log_next), d_u), 0, _then, reverse=True)
        d_u += factor * reached[None]

        known = column < tl.where(tile < every, width, 0)
        entering = tl.load(starts + (batch.to(tl.int64) * every + tile) * width + column, known, other=0.0)
        ahead = (index > 0) & (row - 1 < time)
        _, decay, before = _scanned(projected, keep, start, batch, row - 1, time, ahead, column, width)
        before += decay * entering[None]

        log_decay, f, kept = _log_decays(projected, keep, start, batch, row, time, row < time, column, width)
        through = tl.exp(log_decay) * d_u
        reached = _row_at(through, index, 0)
        kept = kept[:, None]
        d_f = tl.where(kept, -tl.sigmoid(f) * before * through, 0.0)
        d_u = tl.where(kept, d_u, 0.0)
        d_f_sum += tl.sum(d_f, 0)
        d_u_sum += tl.sum(d_u, 0)
        tl.store(d_projected + 3 * at + column[None], d_f, there)
        tl.store(d_projected + 3 * at + width + column[None], d_u, there)
    part = parts + tl.program_id(0).to(tl.int64) * parts_row + 2 * width + column
    tl.store(part, d_f_sum, channel)
    tl.store(part + width, d_u_sum, channel)
    if chunk == 0:
        tl.store(d_hidden + batch.to(tl.int64) * width + column, reached, channel)


@triton.jit
def normalize_kernel(
    x, weight, bias, normed, features, rows, features_row, eps, width: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """x^ = LayerNorm(x) of ROWS tokens, or x without a weight; and x into the features' first columns."""
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)[None]
    token, there = row.to(tl.int64)[:, None], (row < rows)[:, None] & (column < width)
    y = tl.load(x + token * width + column, there, other=0.0)
    tl.store(features + token * features_row + column, y, there)
    if weight is not None:
        y, _ = _normed(y.to(tl.float32), there, width, eps)
        scale = tl.load(weight + column, column < width, other=0.0).to(tl.float32)
        y = y * scale + tl.load(bias + column, column < width, other=0.0).to(tl.float32)
    tl.store(normed + token * width + column, y, there)


@triton.jit
def normalize_backward_kernel(
    grad, d_features, x, weight, d_x, parts, rows, tiles, features_row, parts_row, eps, width: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """dx of `tiles` times ROWS tokens, from the gradients of x^ and of the features' first columns; and the parts of
    the gradients of LayerNorm's weight and bias."""
    column = tl.arange(0, COLUMNS)[None]
    d_scale, d_shift = tl.zeros((1, COLUMNS), tl.float32), tl.zeros((1, COLUMNS), tl.float32)
    for step in range(tiles):
        row = (tl.program_id(0) * tiles + step) * ROWS + tl.arange(0, ROWS)
        token, there = row.to(tl.int64)[:, None], (row < rows)[:, None] & (column < width)
        d_y = tl.load(grad + token * width + column, there, other=0.0).to(tl.float32)
        total = tl.load(d_features + token * features_row + column, there, other=0.0).to(tl.float32)
        if weight is not None:
            y = tl.load(x + token * width + column, there, other=0.0).to(tl.float32)
            normed, rate = _normed(y, there, width, eps)
            d_scale += tl.sum(d_y * normed, 0)[None]
            d_shift += tl.sum(d_y, 0)[None]
            d_y *= tl.load(weight + column, column < width, other=0.0).to(tl.float32)
            slope = tl.sum(d_y * normed, 1)[:, None] / width
            d_y = rate * (d_y - tl.sum(d_y, 1)[:, None] / width - normed * slope)
        tl.store(d_x + token * width + column, total + d_y, there)
    if weight is not None:
        part = parts + tl.program_id(0).to(tl.int64) * parts_row + column
        tl.store(part, d_scale, column < width)
        tl.store(part + width, d_shift, column < width)
