"""Triton kernels for what is elementwise in a softmax layer: rotation, [v | e], the free energy and both gates.

    v (1 + W h), where h are the conditioner's features                                                      (Eq. 34b)
    e = exp(beta (f - c))        [mean | R] = attention(q, k, [v | e])
    F = c + log(R) / beta        o = g ((1 - lambda) mean + lambda F)

Numbers are float32 in registers and 16 bits in memory. In a channel where beta f spans less than 1 nat, which is called
narrow, e is exp(.) - 1 and F = c + log(1 + R) / beta. An R below e^-60 proves nothing, its entry is doubtful: the tile
that holds it raises a flag in memory, for the kernels of `doubt`. The host never waits.

A tile is a block of tokens of one head. Tensors are (B, T, H, d); `*_row` is the distance from one token to the next,
`f_head` from one head to the next: q, k, v and the gates' logits may be columns of one wide tensor, and f of that of
[v | e]. The first MEAN columns of a head of [v | e] are v, the last FREE are e. SHARED: each channel reads both, so f
is v; else v and f are columns of one tensor, [v | f]. CONTEXT: the columns of h, 0 without a conditioner.

RANK: of slim gates, whose logits are U z + b; `inner` and `outer` are then z, (B, T, RANK), and the kernels multiply.
"""

import triton
import triton.language as tl

from fem.ops.common.launch import launched
from fem.ops.common.triton_math import (
    LEAST_PROVEN,
    energy,
    exact_softplus,
    exponential,
    gate,
    level,
    lifted,
    product,
    quotient,
    sigmoid,
    slope_of_beta,
    through_gate,
    turned,
)


@triton.jit
def is_doubtful(total, narrow):
    return (total < LEAST_PROVEN) & (narrow == 0)


@triton.jit
def load_scheme(scheme, beta, batch, head, heads, FREE: tl.constexpr, channel, there):
    """The shift c of a head's channels, whether each is narrow, and its beta."""
    at, channels = head * FREE + channel, heads * FREE
    row = scheme + batch * 2 * channels + at
    shift = tl.load(row, there, other=0.0)
    return shift, tl.load(row + channels, there, other=1.0) > 0, tl.load(beta + at, there, other=1.0)


@triton.jit
def load_logits(
    logits, up, bias, token, rows, head, column, row: tl.constexpr, width: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """Logits of a gate for a tile of tokens of a head."""
    if RANK == 0:
        inside = rows[:, None] & (column < width)[None]
        return tl.load(logits + token * row + head * width + column[None], inside, other=0.0).to(tl.float32)
    else:
        found = product(logits, token, rows, row, up, head, width, RANK, column)
        if bias is not None:
            found += tl.load(bias + head * width + column, column < width, other=0.0).to(tl.float32)[None]
        return found


@launched
def rotate_kernel(
    q, k, q_out, k_out, cos, sin, parts, rows, period,
    q_row: tl.constexpr, k_row: tl.constexpr, q_out_row: tl.constexpr, k_out_row: tl.constexpr,
    heads: tl.constexpr, kv_heads: tl.constexpr, WIDTH: tl.constexpr, SIGN: tl.constexpr, ROWS: tl.constexpr,
    HALF: tl.constexpr,
):  # fmt: skip
    """y_j = x_j cos - x_{j+d/2} sin, y_{j+d/2} = x_{j+d/2} cos + x_j sin, of queries and keys; SIGN -1 turns back.
    Without cos they stay as they are. cos and sin are those of `period` tokens.

    Programs of the first `heads` heads turn q, the others k. q_out and k_out may be q and k. parts: sums of tiles.
    """
    head = tl.program_id(0) % (heads + kv_heads)
    tile = tl.program_id(0) // (heads + kv_heads)
    plane, row = tl.arange(0, HALF), tile * ROWS + tl.arange(0, ROWS)
    there = (row < rows)[:, None] & (plane < WIDTH // 2)[None]
    c, s = tl.full((ROWS, HALF), 1.0, tl.float32), tl.zeros((ROWS, HALF), tl.float32)
    if cos is not None:
        angle = (row % period)[:, None] * (WIDTH // 2) + plane[None]
        c, s = tl.load(cos + angle, there, other=0.0), SIGN * tl.load(sin + angle, there, other=0.0)
    row = row.to(tl.int64)[:, None]
    if head < heads:
        x, y = q + row * q_row + head * WIDTH + plane[None], q_out + row * q_out_row + head * WIDTH + plane[None]
    else:
        other = (head - heads) * WIDTH
        x, y = k + row * k_row + other + plane[None], k_out + row * k_out_row + other + plane[None]
    low, high = turned(x, c, s, there, WIDTH // 2)
    tl.store(y, low, there)
    tl.store(y + WIDTH // 2, high, there)
    if parts is not None:
        at = parts + (tile * (heads + kv_heads) + head) * WIDTH + plane
        tl.store(at, tl.sum(low, 0), plane < WIDTH // 2)
        tl.store(at + WIDTH // 2, tl.sum(high, 0), plane < WIDTH // 2)


@launched
def extremes_kernel(
    v, h, weight, f, both, theta, beta, extremes, time, first, v_row: tl.constexpr, h_row: tl.constexpr,
    f_row: tl.constexpr, f_head: tl.constexpr, MEAN: tl.constexpr, FREE: tl.constexpr, SHARED: tl.constexpr,
    CONTEXT: tl.constexpr, PART: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The least and the greatest f among PART tokens of each sequence: extremes (B, parts, 2, H_kv FREE); and
    beta = softplus(theta + first), or 1 without a theta.

    With a conditioner v (1 + W h) is written on the way: the mean's columns to [v | e], and f.
    """
    head, step, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads = tl.num_programs(0)
    width: tl.constexpr = FREE if SHARED else MEAN + FREE
    column = tl.arange(0, COLUMNS)
    channel = column - (MEAN if CONTEXT > 0 and not SHARED else 0)
    there = (channel >= 0) & (channel < FREE)
    if (step == 0) & (batch == 0):
        rate = tl.full((COLUMNS,), 1.0, tl.float32)
        if theta is not None:
            rate = exact_softplus(tl.load(theta + head * FREE + channel, there, other=0.0).to(tl.float32) + first)
        tl.store(beta + head * FREE + channel, rate, there)
    low = tl.full((ROWS, COLUMNS), float("inf"), tl.float32)
    high = tl.full((ROWS, COLUMNS), float("-inf"), tl.float32)
    for start in range(step * PART, min(step * PART + PART, time), ROWS):
        row = start + tl.arange(0, ROWS)
        token, rows = (batch * time + row).to(tl.int64)[:, None], row < time
        in_free, to_f = rows[:, None] & there[None], f + token * f_row + head * f_head + channel[None]
        if CONTEXT > 0:
            inside = rows[:, None] & (column < width)[None]
            x = tl.load(v + token * v_row + head * width + column[None], inside, other=0.0)
            eta = product(h, token, rows, h_row, weight, head, width, CONTEXT, column)
            x = (x.to(tl.float32) * (1.0 + eta)).to(x.dtype)
            to_mean = both + token * heads * (MEAN + FREE) + head * (MEAN + FREE) + column[None]
            tl.store(to_mean, x, inside & (column < MEAN)[None])
            if not SHARED:
                tl.store(to_f, x, in_free)
        else:
            x = tl.load(to_f, in_free, other=0.0)
        low = tl.minimum(low, tl.where(in_free, x.to(tl.float32), float("inf")))
        high = tl.maximum(high, tl.where(in_free, x.to(tl.float32), float("-inf")))
    at = extremes + (batch * tl.num_programs(1) + step) * 2 * heads * FREE + head * FREE + channel
    tl.store(at, tl.min(low, 0), there)
    tl.store(at + heads * FREE, tl.max(high, 0), there)


@launched
def pack_kernel(
    v, f, extremes, beta, both, scheme, time, parts, v_row: tl.constexpr, f_row: tl.constexpr, f_head: tl.constexpr,
    MEAN: tl.constexpr, FREE: tl.constexpr, SHARED: tl.constexpr, CONTEXT: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """[v | e], without v where it stands there; and the scheme (B, 2, H_kv FREE): each channel's shift c, its greatest
    f, and whether it is narrow.

    c is lifted until beta c is a multiple of log 2: a later token then changes e by a power of 2, not its rounding.
    """
    head, tile, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads = tl.num_programs(0)
    channel, part = tl.arange(0, COLUMNS), tl.arange(0, PARTS)
    there, channels = channel < FREE, heads * FREE
    at = extremes + (batch * parts + part)[:, None] * 2 * channels + (head * FREE + channel)[None]
    known = (part < parts)[:, None] & there[None]
    low = tl.min(tl.load(at, known, other=float("inf")), 0)
    high = tl.max(tl.load(at + channels, known, other=float("-inf")), 0)
    rate = tl.load(beta + head * FREE + channel, there, other=1.0)
    narrow = (high - low) * rate < 1.0
    shift = tl.where(narrow, high, lifted(high, rate))
    if tile == 0:
        row = scheme + batch * 2 * channels + head * FREE + channel
        tl.store(row, shift, there)
        tl.store(row + channels, narrow.to(tl.float32), there)

    row = tile * ROWS + tl.arange(0, ROWS)
    token = (batch * time + row).to(tl.int64)[:, None]
    inside = (row < time)[:, None] & there[None]
    packed = both + token * heads * (MEAN + FREE) + head * (MEAN + FREE) + channel[None]
    x = tl.load(f + token * f_row + head * f_head + channel[None], inside, other=0.0)
    if CONTEXT == 0:
        if SHARED:
            tl.store(packed, x, inside)
        else:
            in_mean = (row < time)[:, None] & (channel < MEAN)[None]
            mean = tl.load(v + token * v_row + head * (MEAN + FREE) + channel[None], in_mean, other=0.0)
            tl.store(packed, mean, in_mean)
    z = (x.to(tl.float32) - shift[None]) * rate[None]
    tl.store(packed + MEAN, energy(z, narrow[None]), inside)


@launched
def pack_backward_kernel(
    d_both, v, h, weight, f, scheme, beta, raised, d_v, d_eta, d_theta, parts, time, v_row: tl.constexpr,
    h_row: tl.constexpr, f_row: tl.constexpr, f_head: tl.constexpr, d_v_row: tl.constexpr, MEAN: tl.constexpr,
    FREE: tl.constexpr, SHARED: tl.constexpr, CONTEXT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """dv, to which de adds beta exp(z) de, and what goes through doubtful entries, which stands in d_v where they are
    raised. Of this tile d_theta is sum_i exp(z) de (f - c) dbeta/dtheta, and parts is sum_i dv.

    With a conditioner this is the gradient of v (1 + W h): dv is 1 + W h times that, and d_eta = d(W h) is v times.
    """
    head, tile, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads = tl.num_programs(0)
    width: tl.constexpr = FREE if SHARED else MEAN + FREE
    column, row = tl.arange(0, COLUMNS), tile * ROWS + tl.arange(0, ROWS)
    token, rows = (batch * time + row).to(tl.int64)[:, None], row < time
    inside = rows[:, None] & (column < width)[None]
    to_v = d_v + token * d_v_row + head * width + column[None]
    packed = d_both + token * heads * (MEAN + FREE) + head * (MEAN + FREE) + column[None]
    d = tl.load(packed, inside & (column < MEAN)[None], other=0.0).to(tl.float32)
    if FREE > 0:
        channel = column if SHARED else column - MEAN
        there = (channel >= 0) & (channel < FREE)
        in_free = rows[:, None] & there[None]
        shift, _narrow, rate = load_scheme(scheme, beta, batch, head, heads, FREE, channel, there)
        x = tl.load(f + token * f_row + head * f_head + channel[None], in_free, other=0.0).to(tl.float32)
        x = tl.where(in_free, x - shift[None], 0.0)
        d_f = tl.load(packed + (MEAN if SHARED else 0), in_free, other=0.0).to(tl.float32)
        d_f *= exponential(rate[None] * x)
        at = (batch * tl.num_programs(1) + tile) * heads * FREE + head * FREE + channel
        tl.store(d_theta + at, tl.sum(d_f * x, 0) * slope_of_beta(rate), there)
        d += rate[None] * d_f
        if tl.load(raised + batch * heads + head) != 0:
            d += tl.load(to_v, in_free, other=0.0).to(tl.float32)
    if CONTEXT > 0:
        x = tl.load(v + token * v_row + head * width + column[None], inside, other=0.0).to(tl.float32)
        tl.store(d_eta + token * heads * width + head * width + column[None], d * x, inside)
        d *= 1.0 + product(h, token, rows, h_row, weight, head, width, CONTEXT, column)
    tl.store(to_v, d, inside)
    if parts is not None:
        at = parts + ((batch * tl.num_programs(1) + tile) * heads + head) * width + column
        tl.store(at, tl.sum(d, 0), column < width)


@launched
def mix_kernel(
    out, inner, outer, inner_up, inner_bias, outer_up, outer_bias, scheme, beta, o, flags, time, eps,
    inner_row: tl.constexpr, outer_row: tl.constexpr, GROUP: tl.constexpr, MEAN: tl.constexpr, FREE: tl.constexpr,
    SHARED: tl.constexpr, GATED: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """o = g u, u = (1 - lambda) mean + lambda F where SHARED, else [mean, F]; a flag is 1 where the tile holds doubt.

    inner, outer: logits of lambda and g. lambda = sigmoid(inner), g = RMSNorm of softplus(outer) over a head, or 1.
    """
    head, tile, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads = tl.num_programs(0)
    width: tl.constexpr = FREE if SHARED else MEAN + FREE
    column, row = tl.arange(0, COLUMNS), tile * ROWS + tl.arange(0, ROWS)
    token, rows = (batch * time + row).to(tl.int64)[:, None], row < time
    inside = rows[:, None] & (column < width)[None]
    summed = out + token * heads * (MEAN + FREE) + head * (MEAN + FREE) + column[None]
    u = tl.load(summed, inside, other=0.0).to(tl.float32)
    if FREE > 0:
        channel = column if SHARED else column - MEAN
        there = (channel >= 0) & (channel < FREE)
        shift, narrow, rate = load_scheme(scheme, beta, batch, head // GROUP, heads // GROUP, FREE, channel, there)
        in_free = rows[:, None] & there[None]
        total = tl.load(summed + MEAN, in_free, other=1.0).to(tl.float32) if SHARED else tl.where(in_free, u, 1.0)
        doubt = tl.max(is_doubtful(total, narrow[None]).to(tl.int32))
        tl.store(flags + (batch * heads + head) * tl.num_programs(1) + tile, doubt)
        lift, _base = level(total, narrow[None])
        free_energy = shift[None] + lift * quotient(1.0, rate)[None]
        if SHARED:
            logit = load_logits(
                inner, inner_up, inner_bias, token, rows, head, column, inner_row, width, RANK,
            )  # fmt: skip
            u += sigmoid(logit) * (free_energy - u)
        else:
            u = tl.where(in_free, free_energy, u)
    if GATED:
        logit = load_logits(outer, outer_up, outer_bias, token, rows, head, column, outer_row, width, RANK)
        u *= gate(logit, (column < width)[None], width, eps)
    tl.store(o + token * heads * width + head * width + column[None], u, inside)


@launched
def mix_backward_kernel(
    d_o, out, inner, outer, inner_up, inner_bias, outer_up, outer_bias, scheme, beta, exact, flags, d_out, d_inner,
    d_outer, d_biases, d_free, d_theta, time, eps,
    inner_row: tl.constexpr, outer_row: tl.constexpr, d_inner_row: tl.constexpr, d_outer_row: tl.constexpr,
    GROUP: tl.constexpr, MEAN: tl.constexpr, FREE: tl.constexpr, SHARED: tl.constexpr, GATED: tl.constexpr,
    RANK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """du = g do; dR = dF / (beta R).

    d_theta: of this tile, -sum_t dF (F - c) / beta dbeta/dtheta. Where entries are doubtful, dF goes to d_free.
    d_biases (B tiles, 2 or 1, H width): of this tile, the gradients of lambda's bias and of g's.
    """
    head, tile, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads = tl.num_programs(0)
    width: tl.constexpr = FREE if SHARED else MEAN + FREE
    column, row = tl.arange(0, COLUMNS), tile * ROWS + tl.arange(0, ROWS)
    token, rows = (batch * time + row).to(tl.int64)[:, None], row < time
    inside = rows[:, None] & (column < width)[None]
    summed = token * heads * (MEAN + FREE) + head * (MEAN + FREE) + column[None]
    u = tl.load(out + summed, inside, other=0.0).to(tl.float32)
    d_u = tl.load(d_o + token * heads * width + head * width + column[None], inside, other=0.0).to(tl.float32)
    if FREE > 0:
        channel = column if SHARED else column - MEAN
        there = (channel >= 0) & (channel < FREE)
        shift, narrow, rate = load_scheme(scheme, beta, batch, head // GROUP, heads // GROUP, FREE, channel, there)
        in_free = rows[:, None] & there[None]
        total = tl.load(out + summed + MEAN, in_free, other=1.0).to(tl.float32) if SHARED else tl.where(in_free, u, 1.0)
        lift, base = level(total, narrow[None])
        inverse = quotient(1.0, rate)[None]
        free_energy, slope = shift[None] + lift * inverse, quotient(inverse, base)
        flagged = tl.load(flags + (batch * heads + head) * tl.num_programs(1) + tile) != 0
        if flagged:  # F was found apart; the gradient of an R that small comes to nothing
            known = tl.load(exact + token * heads * FREE + head * FREE + channel[None], in_free, other=0.0)
            free_energy = tl.where(is_doubtful(total, narrow[None]), known, free_energy)
        gap = free_energy - u
        if SHARED:
            logit = load_logits(
                inner, inner_up, inner_bias, token, rows, head, column, inner_row, width, RANK,
            )  # fmt: skip
            lambda_ = sigmoid(logit)
            u += lambda_ * gap
        else:
            u = tl.where(in_free, free_energy, u)
    if GATED:
        logit = load_logits(outer, outer_up, outer_bias, token, rows, head, column, outer_row, width, RANK)
        d_logit, d_u = through_gate(logit, u, d_u, (column < width)[None], width, eps)
        tl.store(d_outer + token * d_outer_row + head * width + column[None], d_logit, inside)
        if d_biases is not None:
            last = (batch * tl.num_programs(1) + tile) * (SHARED + 1) + SHARED
            at = d_biases + (last * heads + head) * width + column
            tl.store(at, tl.sum(d_logit, 0), column < width)
    if FREE > 0:
        d_f = d_u
        if SHARED:
            d_f = d_u * lambda_
            tl.store(d_out + summed + MEAN, d_f * slope, inside)
            tl.store(d_out + summed, d_u - d_f, inside)
            d_logit = d_f * gap * (1 - lambda_)
            tl.store(d_inner + token * d_inner_row + head * width + column[None], d_logit, inside)
            if d_biases is not None:
                first = (batch * tl.num_programs(1) + tile) * (GATED + 1)
                at = d_biases + (first * heads + head) * width + column
                tl.store(at, tl.sum(d_logit, 0), column < width)
        else:
            tl.store(d_out + summed, tl.where(in_free, d_f * slope, d_u), inside)
        if flagged:
            tl.store(d_free + token * heads * FREE + head * FREE + channel[None], d_f, in_free)
        tilt = -tl.sum(tl.where(there[None], d_f * (lift * inverse), 0.0), 0)
        at = (batch * tl.num_programs(1) + tile) * heads * FREE + head * FREE + channel
        tl.store(d_theta + at, tilt * (slope_of_beta(rate) * quotient(1.0, rate)), there)
    else:
        tl.store(d_out + summed, d_u, inside)
