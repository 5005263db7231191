"""The scan of a state space model on a card: one Triton kernel forward and one backward, token after token.

The equations are those of `summed_cells`. A state of a channel is a cell, which decays by delta a and into which a
token enters with the log-weight log delta + log b. A row reads its cells with the weights c, and then itself once more
through the skip. No value is read on the host.

A program has BLOCK channels of a row, with all their states, which lie side by side: cells are (B, W, N), and so is a.
The backward reads the cells that were kept before every CHUNK-th token, and computes the others again. Other tensors
are those of `SsmInputs`; v or f may have no channel.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fem.ops.common.launch import launched
from fem.ops.common.merge_kernels import (
    LOG_ZERO,
    NO_WEIGHT,
    added,
    block_and_row,
    cells_at,
    keep_cells,
    keep_piece,
    log_or_zero,
    log_shares,
    through_mean,
    through_pieces,
)
from fem.ops.common.triton_math import exponential, quotient
from fem.ops.ssm.summed_cells import (
    bend_of,
    cells_of,
    far_cells,
    far_tokens,
    free_of,
    is_far,
    ratio_of,
    ratios_of,
    read_of,
    slopes,
    steepness,
    sums_of,
    widened,
    with_token,
)


@triton.jit
def load_step(
    delta, log_delta, log_b, log_c, v, f, v_row, f_row, W, channel, state, first, t, N: tl.constexpr,
    HAS_V: tl.constexpr, HAS_F: tl.constexpr,
):  # fmt: skip
    """Of the t-th token from `first` on: delta, log delta, v and f of the channels, log b and log c of the states; 0 of
    what is not there. Loops load a token before they use it; t is an integer of 32 bits, as are places within a chunk.
    """
    live, exists, at, cell = channel < W, state < N, t * W + channel, t * N + state
    value = tl.zeros(channel.shape, tl.float32)
    energy = value
    if HAS_V:
        value = tl.load(v + first * v_row + (t * v_row + channel), live, other=0.0).to(tl.float32)
    if HAS_F:
        energy = tl.load(f + first * f_row + (t * f_row + channel), live, other=0.0).to(tl.float32)
    step = tl.load(delta + first * W + at, live, other=0.0)
    height = tl.load(log_delta + first * W + at, live, other=LOG_ZERO)
    into = tl.load(log_b + first * N + cell, exists, other=LOG_ZERO)
    out = tl.load(log_c + first * N + cell, exists, other=LOG_ZERO)
    return step, height, value, energy, tl.maximum(into, LOG_ZERO), tl.maximum(out, LOG_ZERO)


@triton.jit
def moved(step, height, into, a, opens, token):
    """What a token does to the log-weights of cells: how far they fall, LOG_ZERO where a document opens; its own."""
    fall = step[:, None] * a
    if opens is not None:
        fall = tl.where(tl.load(opens + token) != 0, LOG_ZERO, fall)
    return fall, tl.maximum(height[:, None] + into[None], LOG_ZERO)


@launched
def ssm_kernel(
    delta, log_delta, log_b, log_c, opens, v, f, a, skip, beta, first_weight, first_mean, first_free,
    weights, means, frees, last_weight, last_mean, last_free, kept_weight, kept_mean, kept_free, ends, T, W, v_row,
    f_row, pieces, length, N: tl.constexpr, STATES: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    KEPT: tl.constexpr, ENDS: tl.constexpr, HAS_V: tl.constexpr, HAS_F: tl.constexpr,
):  # fmt: skip
    """What every token of a piece reads; the cells after the last, from the first ones, None of no token; where KEPT
    those before every CHUNK-th token, (B, chunks, W, N). ENDS: instead what a piece does to cells before it, in ends,
    (B, pieces, 5, W, N)."""
    block, of_row = block_and_row(W, BLOCK)
    row, piece, channel = (of_row // pieces).to(tl.int64), of_row % pieces, block * BLOCK + tl.arange(0, BLOCK)
    state, live = tl.arange(0, STATES), channel < W
    both, cell = live[:, None] & (state < N)[None], channel[:, None] * N + state[None]
    begin, every = piece * length, W * N
    count = tl.minimum(T - begin, length)
    at, chunk = row * every + cell, (row * tl.cdiv(T, CHUNK) + begin // CHUNK) * every + cell
    lost, alone = tl.zeros((BLOCK, STATES), tl.float32), tl.zeros((BLOCK,), tl.float32)
    weight, mean, free = lost + LOG_ZERO, lost, lost
    down, rest, end, first = lost, lost, row * pieces * 5 * every + cell, row * T + begin
    falls, own = tl.load(a + cell, both, other=0.0), log_or_zero(tl.load(skip + channel, live, other=0.0))
    rate, middle, narrow = alone + 1.0, alone, live
    if HAS_F:
        rate = tl.load(beta + channel, live, other=1.0)
    if ENDS:
        end += piece * 5 * every
    else:
        if first_weight is not None:
            weight, mean, free = cells_at(first_weight, first_mean, first_free, at, both, HAS_V, HAS_F)
        weight, lost, mean, free = through_pieces(
            weight, lost, mean, free, rate[:, None], ends, end, every, piece, both, HAS_V, HAS_F
        )
    if HAS_F:
        middle = tl.load(f + first * f_row + channel, live, other=0.0).to(tl.float32)
        narrow = tl.max(far_cells(weight, free, middle, rate), 1) == 0.0
    ratio = ratios_of(weight, free, middle, rate, narrow)
    sums = sums_of(weight, lost, mean, ratio, narrow[:, None])
    given = delta, log_delta, log_b, log_c, v, f, v_row, f_row, W, channel, state
    for start in range(0, count, CHUNK):
        token, most = first + start, tl.minimum(count - start, CHUNK)
        if KEPT and not ENDS:
            weight, mean, ratio = cells_of(*sums, narrow[:, None], HAS_V, HAS_F)
            free = free_of(ratio, middle[:, None], rate[:, None], narrow[:, None])
            keep_cells(kept_weight, kept_mean, kept_free, chunk, both, weight, mean, free, HAS_V, HAS_F)
            chunk += every
        ahead = load_step(*given, token, 0, N, HAS_V, HAS_F)
        for t in range(most):
            step, height, value, energy, into, out = ahead
            following = tl.minimum(t + 1, most - 1)
            ahead = load_step(*given, token, following, N, HAS_V, HAS_F)
            fall, x = moved(step, height, into, falls, opens, token + t)
            if HAS_F:
                far = is_far(energy, middle, rate)
                sums = widened(*sums, tl.where(narrow, far, 0.0)[:, None])
                narrow = narrow & (far == 0.0)
            z = ratio_of(energy, middle, rate, narrow)
            sums = with_token(*sums, fall, x, value[:, None], z[:, None], narrow[:, None], HAS_V, HAS_F)
            if ENDS:
                down, rest = added(down, rest, fall)
            else:
                total, read, whole = read_of(*sums, out[None], own, value, z, narrow, HAS_V, HAS_F)
                seen, to = total > NO_WEIGHT, t * W + channel
                tl.store(weights + token * W + to, tl.where(seen, total, LOG_ZERO), live)
                if HAS_V:
                    tl.store(means + token * W + to, tl.where(seen, read, 0.0), live)
                if HAS_F:
                    tl.store(frees + token * W + to, tl.where(seen, free_of(whole, middle, rate, narrow), 0.0), live)
    weight, mean, ratio = cells_of(*sums, narrow[:, None], HAS_V, HAS_F)
    free = free_of(ratio, middle[:, None], rate[:, None], narrow[:, None])
    free = tl.where(weight > NO_WEIGHT, free, 0.0)
    if ENDS:
        keep_piece(ends, end, every, both, down, rest, weight, mean, free, HAS_V, HAS_F)
    elif piece == pieces - 1:
        keep_cells(last_weight, last_mean, last_free, at, both, weight, mean, free, HAS_V, HAS_F)


@triton.jit
def read_at(
    weights, means, frees, d_weights, d_means, d_frees, first, at, live, HAS_V: tl.constexpr, HAS_F: tl.constexpr
):  # fmt: skip
    """What a token reads, and its gradients; 0 of what is not there."""
    total = tl.load(weights + first + at, live, other=LOG_ZERO)
    none = tl.zeros(at.shape, tl.float32)
    d_total, mean, d_mean, free, d_free = none, none, none, none, none
    if d_weights is not None:
        d_total = tl.load(d_weights + first + at, live, other=0.0)
    if HAS_V:
        mean, d_mean = tl.load(means + first + at, live, other=0.0), tl.load(d_means + first + at, live, other=0.0)
    if HAS_F:
        free, d_free = tl.load(frees + first + at, live, other=0.0), tl.load(d_frees + first + at, live, other=0.0)
    return total, mean, free, d_total, d_mean, d_free


@launched
def ssm_backward_kernel(
    delta, log_delta, log_b, log_c, opens, v, f, a, skip, beta, weights, means, frees, kept_weight, kept_mean,
    kept_free, old_weight, old_mean, old_ratio, d_weights, d_means, d_frees, d_last_weight, d_last_mean, d_last_free,
    d_delta, d_log_delta, d_log_b, d_log_c, d_v, d_f, d_a, d_skip, d_beta, d_first_weight, d_first_mean, d_first_free,
    T, W, v_row, f_row, TOKENS, N: tl.constexpr, STATES: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    HAS_V: tl.constexpr, HAS_F: tl.constexpr,
):  # fmt: skip
    """Gradients, from the last token to the first. Those of a, the skip and beta have a part for each row, those of b
    and c one for each block of channels. L, mean and Z before the tokens of a chunk stand in old, (B, CHUNK, W, N).

    w, rho and zeta are the gradients of L, mean and Z. That of beta is, over the parts of each merge and read (tilt),
    or over the tokens i and reads t of a narrow channel, whose Z is no logarithm (bent),

        beta dbeta = sum dZ/dZ_part (Z_part - Z) zeta       beta dbeta = sum_i zeta_i bend(f_i) - sum_t zeta_t bend(F_t)
    """
    block, row = block_and_row(W, BLOCK)
    row, channel = row.to(tl.int64), block * BLOCK + tl.arange(0, BLOCK)
    state, live = tl.arange(0, STATES), channel < W
    exists, part = state < N, block.to(tl.int64) * TOKENS
    both, cell = live[:, None] & exists[None], channel[:, None] * N + state[None]
    chunks, every, end = tl.cdiv(T, CHUNK), W * N, row * W * N + cell
    falls, through = tl.load(a + cell, both, other=0.0), tl.load(skip + channel, live, other=0.0)
    own = log_or_zero(through)
    none, alone = tl.zeros((BLOCK, STATES), tl.float32), tl.zeros((BLOCK,), tl.float32)
    rate, middle, narrow = alone + 1.0, alone, live
    if HAS_F:
        rate, kept = tl.load(beta + channel, live, other=1.0), row * chunks * every + cell
        weight, mean, free = cells_at(kept_weight, kept_mean, kept_free, kept, both, False, HAS_F)
        middle = tl.load(f + row * T * f_row + channel, live, other=0.0).to(tl.float32)
        far = far_tokens(f, row * T, T, f_row, channel, live, middle, rate, 4 * STATES)
        narrow = tl.max(tl.maximum(far_cells(weight, free, middle, rate), far[:, None]), 1) == 0.0
    scale, scales, slow = (middle, rate, narrow), (middle[:, None], rate[:, None], narrow[:, None]), quotient(1.0, rate)
    w, rho, zeta, ratio, a_sum, tilt = none, none, none, none, none, none
    skip_sum, own_tilt, bent = alone, alone, alone
    given = delta, log_delta, log_b, log_c, v, f, v_row, f_row, W, channel, state
    for k in range(chunks):
        chunk = chunks - 1 - k
        at, old = (row * chunks + chunk) * every + cell, row * CHUNK * every + cell
        first, count = row * T + chunk * CHUNK, tl.minimum(T - chunk * CHUNK, CHUNK)
        weight, mean, free = cells_at(kept_weight, kept_mean, kept_free, at, both, HAS_V, HAS_F)
        ratio = ratios_of(weight, free, *scale)
        sums = sums_of(weight, none, mean, ratio, narrow[:, None])
        ahead = load_step(*given, first, 0, N, HAS_V, HAS_F)
        for j in range(count):
            step, height, value, energy, into, out = ahead
            following = tl.minimum(j + 1, count - 1)
            ahead = load_step(*given, first, following, N, HAS_V, HAS_F)
            keep_cells(old_weight, old_mean, old_ratio, old, both, weight, mean, ratio, HAS_V, HAS_F)
            fall, x = moved(step, height, into, falls, opens, first + j)
            z = ratio_of(energy, *scale)
            sums = with_token(*sums, fall, x, value[:, None], z[:, None], narrow[:, None], HAS_V, HAS_F)
            weight, mean, ratio = cells_of(*sums, narrow[:, None], HAS_V, HAS_F)
            old += every
        if d_last_weight is not None:  # noqa: SIM102 (known when the kernel is compiled, k is not)
            if k == 0:
                w = tl.load(d_last_weight + end, both, other=0.0)
                if HAS_V:
                    rho = tl.load(d_last_mean + end, both, other=0.0)
                if HAS_F:
                    d_free = tl.where(weight > NO_WEIGHT, tl.load(d_last_free + end, both, other=0.0), 0.0)
                    zeta = quotient(d_free * slow[:, None], steepness(ratio, narrow[:, None]))
                    bent -= tl.sum(zeta * bend_of(free_of(ratio, *scales), *scales), 1)
        tl.debug_barrier()
        old -= every
        ahead = load_step(*given, first, count - 1, N, HAS_V, HAS_F)
        earlier = cells_at(old_weight, old_mean, old_ratio, old, both, HAS_V, HAS_F)
        read = read_at(
            weights, means, frees, d_weights, d_means, d_frees, first * W, (count - 1) * W + channel, live, HAS_V, HAS_F
        )
        for j in range(count):
            t = count - 1 - j
            place, into_b = t * W + channel, t * N + state
            step, height, value, energy, into, out = ahead
            weight_before, mean_before, ratio_before = earlier
            total, mean_read, free_read, d_total, d_mean, d_free = read
            following = tl.maximum(t - 1, 0)
            old -= every * tl.minimum(t, 1)
            ahead = load_step(*given, first, following, N, HAS_V, HAS_F)
            earlier = cells_at(old_weight, old_mean, old_ratio, old, both, HAS_V, HAS_F)
            read = read_at(
                weights, means, frees, d_weights, d_means, d_frees, first * W, following * W + channel, live, HAS_V,
                HAS_F,
            )  # fmt: skip

            # Through the read: of each cell, and of the token itself.
            fall, x = moved(step, height, into, falls, opens, first + t)
            seen, z = total > NO_WEIGHT, ratio_of(energy, *scale)
            log_p = tl.where(seen[:, None], tl.maximum(weight + out[None] - total[:, None], LOG_ZERO), LOG_ZERO)
            log_own = tl.where(seen, own - total, LOG_ZERO)
            p, p_own = exponential(log_p), exponential(log_own)
            d_score, d_own, d_value, d_z = p * d_total[:, None], p_own * d_total, alone, alone
            if HAS_V:
                d_score += p * (mean - mean_read[:, None]) * d_mean[:, None]
                d_own += p_own * (value - mean_read) * d_mean
                rho += p * d_mean[:, None]
                d_value = p_own * d_mean
            if HAS_F:
                whole = ratio_of(free_read, *scale)
                d_whole = tl.where(seen, quotient(d_free * slow, steepness(whole, narrow)), 0.0)
                slope, d_log, tilted = slopes(log_p, ratio, whole[:, None], narrow[:, None])
                d_score += d_log * d_whole[:, None]
                zeta += slope * d_whole[:, None]
                tilt += tilted * d_whole[:, None]
                slope, d_log, tilted = slopes(log_own, z, whole, narrow)
                d_own += d_log * d_whole
                d_z = slope * d_whole
                own_tilt += tilted * d_whole
                bent -= d_whole * bend_of(free_read, *scale)
            tl.store(d_log_c + (part + first) * N + into_b, tl.sum(d_score, 0), exists)
            w += d_score
            skip_sum += d_own

            # Through the cells.
            log_share, log_keep = log_shares(x, fall, weight_before, weight)
            share, keep = exponential(log_share), exponential(log_keep)
            of_x, of_fall = w * share, w * keep
            if HAS_V:
                tl.store(d_v + first * W + place, d_value + tl.sum(share * rho, 1), live)
                d_x, d_fall, rho = through_mean(share, keep, value[:, None], mean_before, mean, rho)
                of_x, of_fall = of_x + d_x, of_fall + d_fall
            if HAS_F:
                slope, d_log, tilted = slopes(log_share, z[:, None], ratio, narrow[:, None])
                d_z += tl.sum(slope * zeta, 1)
                tl.store(d_f + first * W + place, d_z * rate * steepness(z, narrow), live)
                bent += d_z * bend_of(energy, *scale)
                of_x += d_log * zeta
                slope, d_log, more = slopes(log_keep, ratio_before, ratio, narrow[:, None])
                of_fall += d_log * zeta
                tilt += (tilted + more) * zeta
                zeta *= slope
            tl.store(d_log_delta + first * W + place, tl.sum(of_x, 1), live)
            tl.store(d_log_b + (part + first) * N + into_b, tl.sum(of_x, 0), exists)
            tl.store(d_delta + first * W + place, tl.sum(of_fall * falls, 1), live)
            a_sum += of_fall * step[:, None]
            w, weight, mean, ratio = of_fall, weight_before, mean_before, ratio_before
        tl.debug_barrier()  # the next chunk writes to the same place
    if d_first_weight is not None:
        d_free = zeta * rate[:, None] * steepness(ratio, narrow[:, None])
        keep_cells(d_first_weight, d_first_mean, d_first_free, end, both, w, rho, d_free, HAS_V, HAS_F)
        bent += tl.sum(zeta * bend_of(free_of(ratio, *scales), *scales), 1)
    tl.store(d_a + end, a_sum, both)
    tl.store(d_skip + row * W + channel, skip_sum / tl.where(through > 0.0, through, 1.0), live)
    if HAS_F:
        tl.store(d_beta + row * W + channel, tl.where(narrow, bent, own_tilt + tl.sum(tilt, 1)) * slow, live)
