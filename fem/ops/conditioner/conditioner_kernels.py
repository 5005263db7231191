"""The conditioner in Triton: two kernels forward and two backward.

    x^ = LayerNorm(x)    [f, u, a] = W x^ + b    s = softplus(f)
    h~_t = e^{-s_t} h~_{t-1} + u_t    h_t = SiLU(length l2norm(softplus(a_t))) * LayerNorm(h~_t)

A program has one chunk of a row's tokens in all C channels, and goes through it by tiles of TIME tokens. The first
kernel multiplies and sums a chunk up; where a row is a single tile, it goes on to h, and there is no second one. What
enters a chunk is a sum over all earlier ones, of their ends S_m and the logarithms L_k of their whole decays,

    h~ = S_{n-1} + sum_{m < n} exp(sum_{m <= k < n} L_k) S_{m-1}        S_{-1} the state before the first token

so nothing is divided by a decay, the rounding of factors near 1 does not pile up, and no program waits for another. The
gradient of h~ runs the other way by the same formula. Numbers are float32 in registers; products are of the dtype of W.
Without `bends` there is no SiLU.

x (B, T, D), x^ and [f, u, a], `projected` (B, T, 3 C), are contiguous, as are keep and start (B, T), one byte each, or
None. `out` and its gradient are columns of the features [x, h], whose rows are `*_row` apart. Of the gradients of
weights and biases every program writes its part: a row of `parts`, of LayerNorm's weight and bias and of the biases of
f, u and a, C each; and for every tile a row of `norm_parts`, of the first norm's weight and bias, D each.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fem.ops.common.launch import launched
from fem.ops.common.triton_math import dot, exact_softplus

LEAST_LENGTH = tl.constexpr(1e-12)  # of `torch.nn.functional.normalize`


@triton.jit
def _then(decay, u, next_decay, next_u):
    return decay * next_decay, next_decay * u + next_u


@triton.jit
def _log_decays(f, keep, start, at, inside):
    """Logarithms of the decays into tokens, -inf where a document starts, 0 for a masked token; and which are kept."""
    kept = inside
    if keep is not None:
        kept &= tl.load(keep + at, inside, other=0) != 0
    log_decay = tl.where(kept[:, None], -exact_softplus(f), 0.0)
    if start is not None:
        starts = tl.load(start + at, inside, other=0) != 0
        log_decay = tl.where(starts[:, None], float("-inf"), log_decay)
    return log_decay, kept[:, None]


@triton.jit
def _part(projected, n: tl.constexpr, at, inside, column, width: tl.constexpr):
    """f, u or a of tokens."""
    there = inside[:, None] & (column < width)[None]
    return tl.load(projected + at[:, None] * (3 * width) + n * width + column[None], there, other=0.0).to(tl.float32)


@triton.jit
def _scanned(projected, keep, start, at, inside, column, width: tl.constexpr):
    """Decays of tokens, as logarithms, and from the first of them: as factors, and what they add to the state."""
    f = _part(projected, 0, at, inside, column, width)
    u = _part(projected, 1, at, inside, column, width)
    log_decay, kept = _log_decays(f, keep, start, at, inside)
    decay, state = tl.associative_scan((tl.exp(log_decay), tl.where(kept, u, 0.0)), 0, _then)
    return log_decay, decay, state


@triton.jit
def _row_at(x, index, of):
    """Row `of` of x."""
    return tl.sum(tl.where((index == of)[:, None], x, 0.0), 0)


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
    """y = length l2norm(softplus(a)), one over what it is divided by, and whether that is the norm."""
    s = tl.where(there, exact_softplus(a), 0.0)
    norm = tl.sqrt(tl.sum(s * s, 1))[:, None]
    rate = 1.0 / tl.maximum(norm, LEAST_LENGTH)
    return s * (rate * length), rate, norm > LEAST_LENGTH


@triton.jit
def _statistics(x, at, inside, inputs: tl.constexpr, eps, TIME: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr):
    """The mean of each token's inputs and one over their deviation, of one block of inputs after the other."""
    mean, squares = tl.zeros((TIME,), tl.float32), tl.zeros((TIME,), tl.float32)
    for first in tl.range(0, inputs, STEP, num_stages=STAGES):
        feature = first + tl.arange(0, STEP)
        there = inside[:, None] & (feature < inputs)[None]
        y = tl.load(x + at[:, None] * inputs + feature[None], there, other=0.0).to(tl.float32)
        count = tl.minimum(inputs - first, STEP)
        share = count / (first + count)
        of_block = tl.sum(y, 1) / count
        centred, apart = tl.where(there, y - of_block[:, None], 0.0), of_block - mean
        squares += tl.sum(centred * centred, 1) + apart * apart * (first * share)
        mean += apart * share
    return mean[:, None], tl.rsqrt(squares / inputs + eps)[:, None]


@triton.jit
def _store_part(total, map_bias, projected, n: tl.constexpr, at, inside, column, width: tl.constexpr):
    """f, u or a with its bias, as it is written: rounded."""
    if map_bias is not None:
        total += tl.load(map_bias + n * width + column, column < width, other=0.0).to(tl.float32)[None]
    there = inside[:, None] & (column < width)[None]
    total = total.to(projected.dtype.element_ty)
    tl.store(projected + at[:, None] * (3 * width) + n * width + column[None], total, there)
    return total.to(tl.float32)


@triton.jit
def _project(
    x, in_weight, in_bias, map_weight, map_bias, features, normed, projected, at, inside, column, features_row, eps,
    inputs: tl.constexpr, width: tl.constexpr, TIME: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """f, u and a of a tile; writes them, x^, and x into the features' first columns."""
    if in_weight is not None:
        mean, rate = _statistics(x, at, inside, inputs, eps, TIME, 4 * STEP, 1)
    f = tl.zeros((TIME, COLUMNS), tl.float32)
    u, a = tl.zeros_like(f), tl.zeros_like(f)
    for first in tl.range(0, inputs, STEP, num_stages=STAGES):
        feature = first + tl.arange(0, STEP)
        known = feature < inputs
        there, token = inside[:, None] & known[None], at[:, None]
        y = tl.load(x + token * inputs + feature[None], there, other=0.0)
        tl.store(features + token * features_row + feature[None], y, there)
        if in_weight is not None:
            y = (y.to(tl.float32) - mean) * rate * tl.load(in_weight + feature, known, other=0.0).to(tl.float32)[None]
            y += tl.load(in_bias + feature, known, other=0.0).to(tl.float32)[None]
        y = y.to(normed.dtype.element_ty)
        tl.store(normed + token * inputs + feature[None], y, there)
        w, lies = map_weight + column[None] * inputs + feature[:, None], (column < width)[None] & known[:, None]
        f = dot(y, tl.load(w, lies, other=0.0), f, PRECISION)
        u = dot(y, tl.load(w + width * inputs, lies, other=0.0), u, PRECISION)
        a = dot(y, tl.load(w + 2 * width * inputs, lies, other=0.0), a, PRECISION)
    f = _store_part(f, map_bias, projected, 0, at, inside, column, width)
    u = _store_part(u, map_bias, projected, 1, at, inside, column, width)
    return f, u, _store_part(a, map_bias, projected, 2, at, inside, column, width)


@triton.jit
def _h(state, a, there, scale, shift, eps, length: tl.constexpr, bends: tl.constexpr, width: tl.constexpr):
    """h of h~ and a."""
    y, _, _ = _unit(a, there, length)
    normed, _ = _normed(state, there, width, eps)
    if bends:
        y *= tl.sigmoid(y)
    return y * (normed * scale + shift)


@triton.jit
def _affine(weight, bias, column, width: tl.constexpr):
    """LayerNorm's weight and bias."""
    scale = tl.load(weight + column, column < width, other=0.0).to(tl.float32)
    shift = tl.load(bias + column, column < width, other=0.0).to(tl.float32)
    return scale[None], shift[None]


@launched
def project_kernel(
    x, in_weight, in_bias, map_weight, map_bias, weight, bias, keep, start, hidden, features, normed, projected,
    summaries, last, starts, time, chunks, tiles, features_row, in_eps, eps, ALONE: tl.constexpr, length: tl.constexpr,
    bends: tl.constexpr, inputs: tl.constexpr, width: tl.constexpr, TIME: tl.constexpr, COLUMNS: tl.constexpr,
    STEP: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """[f, u, a] and x^, x into the features; and summaries (B, chunks, 2, C): the logarithm of a chunk's decay, and the
    state at its end without what entered. ALONE, a chunk that is a row and one tile: instead all of `condition_kernel`.
    """
    chunk, batch = tl.program_id(0) % chunks, tl.program_id(0) // chunks
    index, column = tl.arange(0, TIME), tl.arange(0, COLUMNS)
    channel, log_total, end = column < width, tl.zeros((COLUMNS,), tl.float32), tl.zeros((COLUMNS,), tl.float32)
    for tile in range(tiles):
        row = (chunk * tiles + tile) * TIME + index
        inside, at = row < time, batch.to(tl.int64) * time + row
        f, u, a = _project(
            x, in_weight, in_bias, map_weight, map_bias, features, normed, projected, at, inside, column, features_row,
            in_eps, inputs, width, TIME, COLUMNS, STEP, STAGES, PRECISION,
        )  # fmt: skip
        log_decay, kept = _log_decays(f, keep, start, at, inside)
        decay, state = tl.associative_scan((tl.exp(log_decay), tl.where(kept, u, 0.0)), 0, _then)
        if ALONE:
            if hidden is not None:
                end = tl.load(hidden + batch.to(tl.int64) * width + column, channel, other=0.0).to(tl.float32)
            tl.store(starts + batch.to(tl.int64) * width + column, end, channel)
            state += decay * end[None]
            scale, shift = _affine(weight, bias, column, width)
            there = inside[:, None] & channel[None]
            h = _h(state, a, there, scale, shift, eps, length, bends, width)
            tl.store(features + at[:, None] * features_row + inputs + column[None], h, there)
            tl.store(last + batch.to(tl.int64) * width + column, _row_at(state, index, TIME - 1), channel)
        else:
            total = tl.sum(log_decay, 0)
            end = tl.exp(total) * end + _row_at(state, index, TIME - 1)
            log_total += total
    if not ALONE:
        at = summaries + (batch.to(tl.int64) * chunks + chunk) * (2 * width) + column
        tl.store(at, log_total, channel)
        tl.store(at + width, end, channel)


@launched
def condition_kernel(
    projected, weight, bias, keep, start, hidden, summaries, out, last, starts, time, chunks, tiles, out_row, eps,
    length: tl.constexpr, bends: tl.constexpr, width: tl.constexpr, TIME: tl.constexpr, COLUMNS: tl.constexpr,
    CHUNKS: tl.constexpr,
):  # fmt: skip
    """h (B, T, C), the last state (B, C), and the states that enter tiles, (B, all tiles, C)."""
    chunk, batch = tl.program_id(0) % chunks, tl.program_id(0) // chunks
    index, column = tl.arange(0, TIME), tl.arange(0, COLUMNS)
    channel = column < width
    scale, shift = _affine(weight, bias, column, width)
    entering = _gathered(summaries, hidden, batch, chunk, chunks, column, width, 1, CHUNKS)
    every = tl.cdiv(time, TIME)
    for step in range(tiles):
        tile = chunk * tiles + step
        known = column < tl.where(tile < every, width, 0)
        tl.store(starts + (batch.to(tl.int64) * every + tile) * width + column, entering, known)
        row = tile * TIME + index
        inside, at = row < time, batch.to(tl.int64) * time + row
        _, decay, state = _scanned(projected, keep, start, at, inside, column, width)
        state += decay * entering[None]
        entering = _row_at(state, index, TIME - 1)
        there = inside[:, None] & channel[None]
        a = _part(projected, 2, at, inside, column, width)
        h = _h(state, a, there, scale, shift, eps, length, bends, width)
        tl.store(out + at[:, None] * out_row + column[None], h, there)
    if chunk == chunks - 1:
        tl.store(last + batch.to(tl.int64) * width + column, entering, channel)


@launched
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
    scale, shift = _affine(weight, bias, column, width)
    zeros = tl.zeros((COLUMNS,), tl.float32)
    d_scale, d_shift, d_bias, log_total, given = zeros, zeros, zeros, zeros, zeros
    every = tl.cdiv(time, TIME)
    for step in range(tiles):
        tile = chunk * tiles + step
        known = column < tl.where(tile < every, width, 0)
        entering = tl.load(starts + (batch.to(tl.int64) * every + tile) * width + column, known, other=0.0)
        row = tile * TIME + index
        inside, at = row < time, batch.to(tl.int64) * time + row
        log_decay, decay, state = _scanned(projected, keep, start, at, inside, column, width)
        there = inside[:, None] & channel[None]
        normed, rate = _normed(state + decay * entering[None], there, width, eps)
        a = _part(projected, 2, at, inside, column, width)
        y, rate_of_a, by_norm = _unit(a, there, length)
        gate, slope_of_gate = y, tl.full(y.shape, 1.0, tl.float32)
        if bends:
            gate = y * tl.sigmoid(y)
            slope_of_gate = tl.sigmoid(y) * (1.0 + y * (1.0 - tl.sigmoid(y)))
        d_h = tl.load(grad + at[:, None] * grad_row + column[None], there, other=0.0).to(tl.float32)

        d_affine = d_h * gate
        d_scale += tl.sum(d_affine * normed, 0)
        d_shift += tl.sum(d_affine, 0)
        d_normed = d_affine * scale
        slope = tl.sum(d_normed * normed, 1)[:, None] / width
        d_x = rate * (d_normed - tl.sum(d_normed, 1)[:, None] / width - normed * slope)
        tl.store(d_state + at[:, None] * width + column[None], d_x, there)
        given += tl.exp(log_total) * tl.sum(tl.where(there, decay * d_x, 0.0), 0)
        log_total += tl.sum(log_decay, 0)

        d_y = d_h * (normed * scale + shift) * slope_of_gate
        along = tl.where(by_norm, tl.sum(d_y * y, 1)[:, None] / (length * length), 0.0)
        d_a = tl.where(there, (d_y - y * along) * (rate_of_a * length) * tl.sigmoid(a), 0.0)
        d_bias += tl.sum(d_a, 0)
        tl.store(d_projected + at[:, None] * (3 * width) + 2 * width + column[None], d_a, there)
    at = tl.program_id(0).to(tl.int64) * (2 * width) + column
    tl.store(summaries + at, log_total, channel)
    tl.store(summaries + at + width, given, channel)
    part = parts + tl.program_id(0).to(tl.int64) * parts_row + column
    tl.store(part, d_scale, channel)
    tl.store(part + width, d_shift, channel)
    tl.store(part + 4 * width, d_bias, channel)


@triton.jit
def _d_normed(
    d_f, d_u, d_a, map_weight, feature, column, inputs: tl.constexpr, width: tl.constexpr, PRECISION: tl.constexpr
):
    """The gradient of a block of x^."""
    w = map_weight + column[:, None] * inputs + feature[None]
    lies = (column < width)[:, None] & (feature < inputs)[None]
    total = tl.zeros((d_f.shape[0], feature.shape[0]), tl.float32)
    total = dot(d_f, tl.load(w, lies, other=0.0), total, PRECISION)
    total = dot(d_u, tl.load(w + width * inputs, lies, other=0.0), total, PRECISION)
    return dot(d_a, tl.load(w + 2 * width * inputs, lies, other=0.0), total, PRECISION)


@triton.jit
def _normed_block(x, mean, rate, at, inside, feature, inputs: tl.constexpr):
    """A block of x^ without the norm's weight and bias."""
    there = inside[:, None] & (feature < inputs)[None]
    y = tl.load(x + at[:, None] * inputs + feature[None], there, other=0.0).to(tl.float32)
    return tl.where(there, (y - mean) * rate, 0.0)


@triton.jit
def _through_projection(
    d_f, d_u, d_a, x, in_weight, map_weight, d_features, d_x, norm_parts, at, inside, column, features_row, eps,
    inputs: tl.constexpr, width: tl.constexpr, TIME: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dx of a tile, with what the features' first columns give; and its row of `norm_parts`. The gradient of x^ is
    multiplied out twice, as LayerNorm's gradient takes sums over all of it."""
    if in_weight is not None:
        mean, rate = _statistics(x, at, inside, inputs, eps, TIME, STEP, STAGES)
        total, along = tl.zeros((TIME,), tl.float32), tl.zeros((TIME,), tl.float32)
        for first in tl.range(0, inputs, STEP, num_stages=STAGES):
            feature = first + tl.arange(0, STEP)
            known = feature < inputs
            d_y = _d_normed(d_f, d_u, d_a, map_weight, feature, column, inputs, width, PRECISION)
            normed = _normed_block(x, mean, rate, at, inside, feature, inputs)
            tl.store(norm_parts + feature, tl.sum(d_y * normed, 0), known)
            tl.store(norm_parts + inputs + feature, tl.sum(d_y, 0), known)
            d_y *= tl.load(in_weight + feature, known, other=0.0).to(tl.float32)[None]
            total += tl.sum(d_y, 1)
            along += tl.sum(d_y * normed, 1)
        total, along = (total / inputs)[:, None], (along / inputs)[:, None]
    for first in tl.range(0, inputs, STEP, num_stages=STAGES):
        feature = first + tl.arange(0, STEP)
        known = feature < inputs
        d_y = _d_normed(d_f, d_u, d_a, map_weight, feature, column, inputs, width, PRECISION)
        if in_weight is not None:
            d_y *= tl.load(in_weight + feature, known, other=0.0).to(tl.float32)[None]
            d_y = rate * (d_y - total - _normed_block(x, mean, rate, at, inside, feature, inputs) * along)
        there, token = inside[:, None] & known[None], at[:, None]
        d_y += tl.load(d_features + token * features_row + feature[None], there, other=0.0).to(tl.float32)
        tl.store(d_x + token * inputs + feature[None], d_y, there)


@launched
def state_backward_kernel(
    projected, keep, start, starts, d_state, d_last, summaries, d_projected, d_hidden, parts, x, in_weight, map_weight,
    d_features, d_x, norm_parts, time, chunks, tiles, parts_row, features_row, in_eps, inputs: tl.constexpr,
    width: tl.constexpr, TIME: tl.constexpr, COLUMNS: tl.constexpr, CHUNKS: tl.constexpr, STEP: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """du_t = dh~_t + e^{-s_{t+1}} du_{t+1},    df_t = -sigmoid(f_t) e^{-s_t} h~_{t-1} du_t, d h~_0, and dx; and the
    parts of the gradients of the biases of f and u, and of the first norm."""
    chunk, batch = tl.program_id(0) % chunks, tl.program_id(0) // chunks
    index, column = tl.arange(0, TIME), tl.arange(0, COLUMNS)
    channel = column < width
    d_f_sum, d_u_sum = tl.zeros((COLUMNS,), tl.float32), tl.zeros((COLUMNS,), tl.float32)
    reached = _gathered(summaries, d_last, batch, chunk, chunks, column, width, -1, CHUNKS)
    every = tl.cdiv(time, TIME)
    for step in range(tiles):
        tile = chunk * tiles + tiles - 1 - step
        row = tile * TIME + index
        inside, at = row < time, batch.to(tl.int64) * time + row
        there, write = inside[:, None] & channel[None], d_projected + at[:, None] * (3 * width) + column[None]

        behind = (index < TIME - 1) & (row + 1 < time)
        log_next, _ = _log_decays(_part(projected, 0, at + 1, behind, column, width), keep, start, at + 1, behind)
        d_u = tl.load(d_state + at[:, None] * width + column[None], there, other=0.0)
        factor, d_u = tl.associative_scan((tl.exp(log_next), d_u), 0, _then, reverse=True)
        d_u += factor * reached[None]

        known = column < tl.where(tile < every, width, 0)
        entering = tl.load(starts + (batch.to(tl.int64) * every + tile) * width + column, known, other=0.0)
        ahead = (index > 0) & (row - 1 < time)
        _, decay, before = _scanned(projected, keep, start, at - 1, ahead, column, width)
        before += decay * entering[None]

        f = _part(projected, 0, at, inside, column, width)
        log_decay, kept = _log_decays(f, keep, start, at, inside)
        through = tl.exp(log_decay) * d_u
        reached = _row_at(through, index, 0)
        d_f = tl.where(kept, -tl.sigmoid(f) * before * through, 0.0)
        d_u = tl.where(kept, d_u, 0.0)
        d_f_sum += tl.sum(d_f, 0)
        d_u_sum += tl.sum(d_u, 0)
        dtype = d_projected.dtype.element_ty
        d_f, d_u, d_a = d_f.to(dtype), d_u.to(dtype), tl.load(write + 2 * width, there, other=0.0)
        tl.store(write, d_f, there)
        tl.store(write + width, d_u, there)
        of_tile = norm_parts
        if in_weight is not None:
            of_tile += (batch.to(tl.int64) * chunks * tiles + tile) * (2 * inputs)
        _through_projection(
            d_f, d_u, d_a, x, in_weight, map_weight, d_features, d_x, of_tile, at, inside, column, features_row, in_eps,
            inputs, width, TIME, STEP, STAGES, PRECISION,
        )  # fmt: skip
    part = parts + tl.program_id(0).to(tl.int64) * parts_row + 2 * width + column
    tl.store(part, d_f_sum, channel)
    tl.store(part + width, d_u_sum, channel)
    if chunk == 0:
        tl.store(d_hidden + batch.to(tl.int64) * width + column, reached, channel)
