"""Triton kernels that compute doubtful free energies, those which R does not prove, from their definition.

    F = c + log sum_i p_i exp(beta (f_i - c)) / beta        w_i = p_i exp(beta (f_i - F))        dF/df_i = w_i
    dF/ds_i = (w_i - p_i) / beta                            dF/dbeta = sum_i w_i (f_i - F) / beta

They go row by row, in float32, with p from the scores s and attention's own log sum of exponentials. They are launched
in every call, and a program ends at once where none of its flags is up. time: rows; count: keys. first_key and end_key,
(B, time) or (1, time), bound the keys of a row in documents, windows and behind a cache; None: it sees all, or if
CAUSAL those up to it.
"""

import triton
import triton.language as tl

from fem.ops.common.launch import launched
from fem.ops.common.triton_math import STEP, logarithm, slope_of_beta, softplus
from fem.ops.softmax.fused.elementwise_kernels import is_doubtful, load_scheme


@triton.jit
def any_raised(flags, first, count, COUNT: tl.constexpr):
    number = tl.arange(0, COUNT)
    return tl.max(tl.load(flags + first + number, number < count, other=0)) != 0


@triton.jit
def load_row(
    q, lse, out, narrow, there, batch, head, row, time, heads, q_row, KEY: tl.constexpr, MEAN: tl.constexpr,
    FREE: tl.constexpr, wide, channel,
):  # fmt: skip
    """A row's token and query, its log sum of exponentials, and which of its entries are doubtful."""
    token = (batch * time + row).to(tl.int64)
    query = tl.load(q + token * q_row + head * KEY + wide, wide < KEY, other=0.0).to(tl.float32)
    at = (token * heads + head) * (MEAN + FREE) + MEAN + channel
    total = tl.load(out + at, there, other=1.0).to(tl.float32)
    return token, query, tl.load(lse + (batch * heads + head) * time + row), is_doubtful(total, narrow) & there


@triton.jit
def load_keys(
    k, f, there, batch, key, count, kv_head, k_row, f_row, f_head, KEY: tl.constexpr, wide, channel,
):  # fmt: skip
    """A block of keys and their f, and which of their numbers exist."""
    token, inside = (batch * count + key).to(tl.int64)[:, None], (key < count)[:, None]
    keys_in, f_in = inside & (wide < KEY)[None], inside & there[None]
    keys = tl.load(k + token * k_row + kv_head * KEY + wide[None], keys_in, other=0.0)
    x = tl.load(f + token * f_row + kv_head * f_head + channel[None], f_in, other=0.0)
    return keys.to(tl.float32), x.to(tl.float32), token, keys_in, f_in


@triton.jit
def load_bounds(first, end, bound_batch, batch, row, time, CAUSAL: tl.constexpr):
    """The keys that a row sees: from which on, and up to which."""
    if first is not None:
        at = batch * bound_batch + row
        return tl.load(first + at), tl.load(end + at)
    return 0, row + 1 if CAUSAL else time


@triton.jit
def log_probability(query, keys, lse, key, low, high, scale):
    """log p of a row over a block of keys, (KEYS, 1); -inf where it does not see them."""
    seen = (key >= low) & (key < high)
    return tl.where(seen, scale * tl.sum(keys * query[None], 1) - lse, float("-inf"))[:, None]


@triton.jit
def weights(log_p, f, free_energy, d_free, rate, doubtful):
    """w of the doubtful entries, and what the gradient of their F adds to the scores'."""
    w = tl.exp(tl.where(doubtful[None], log_p + rate[None] * (f - free_energy[None]), float("-inf")))
    g = d_free / rate
    return w, tl.sum(g[None] * w, 1) - tl.exp(tl.max(log_p, 1)) * tl.sum(g)


@triton.jit
def row_logits(
    logits, up, bias, token, head, column, there, row: tl.constexpr, width: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """Logits of a gate for some columns of a token's head."""
    at = head * width + column
    if RANK == 0:
        return tl.load(logits + token * row + at, there, other=0.0).to(tl.float32)
    else:
        found = tl.zeros_like(column).to(tl.float32)
        for first in tl.static_range(0, RANK, STEP):
            inner = first + tl.arange(0, STEP)
            z = tl.load(logits + token * row + inner, inner < RANK, other=0.0).to(tl.float32)
            u = tl.load(up + at[:, None] * RANK + inner[None], there[:, None] & (inner < RANK)[None], other=0.0)
            found += tl.sum(u.to(tl.float32) * z[None], 1)
        if bias is not None:
            found += tl.load(bias + at, there, other=0.0).to(tl.float32)
        return found


@launched
def doubtful_rows_kernel(
    q, k, f, lse, out, first_key, end_key, scheme, beta, exact, flags, inner, outer, inner_up, inner_bias, outer_up,
    outer_bias, o, time, count, bound_batch, tiles, scale, eps,
    q_row: tl.constexpr, k_row: tl.constexpr, f_row: tl.constexpr, f_head: tl.constexpr,
    inner_row: tl.constexpr, outer_row: tl.constexpr,
    heads: tl.constexpr, GROUP: tl.constexpr, KEY: tl.constexpr, MEAN: tl.constexpr, FREE: tl.constexpr,
    SHARED: tl.constexpr, GATED: tl.constexpr, MIXED: tl.constexpr, RANK: tl.constexpr,
    CAUSAL: tl.constexpr, TILE: tl.constexpr,
    KEYS: tl.constexpr, COLUMNS: tl.constexpr, CHANNELS: tl.constexpr, WIDE: tl.constexpr, FLAGS: tl.constexpr,
):  # fmt: skip
    """The doubtful F of FLAGS tiles: into `exact` (B, T, H, FREE), or where MIXED, mixed and gated, into o."""
    head, first, batch = tl.program_id(0), tl.program_id(1) * FLAGS, tl.program_id(2)
    if any_raised(flags, (batch * heads + head) * tiles + first, tiles - first, FLAGS):
        channel, column, wide = tl.arange(0, CHANNELS), tl.arange(0, COLUMNS), tl.arange(0, WIDE)
        there, kv_head = channel < FREE, head // GROUP
        SOURCE: tl.constexpr = FREE if SHARED else MEAN + FREE
        FREE_AT: tl.constexpr = 0 if SHARED else MEAN
        shift, narrow, rate = load_scheme(scheme, beta, batch, kv_head, heads // GROUP, FREE, channel, there)
        for row in range(first * TILE, min((first + FLAGS) * TILE, time)):
            token, query, lse_row, doubtful = load_row(
                q, lse, out, narrow, there, batch, head, row, time, heads, q_row, KEY, MEAN, FREE, wide, channel
            )
            if tl.max(doubtful.to(tl.int32)) != 0:
                top = tl.full((CHANNELS,), float("-inf"), tl.float32)
                summed = tl.zeros((CHANNELS,), tl.float32)
                low, high = load_bounds(first_key, end_key, bound_batch, batch, row, time, CAUSAL)
                for start in range(low, high, KEYS):
                    key = start + tl.arange(0, KEYS)
                    keys, x, _, _, _ = load_keys(
                        k, f, there, batch, key, count, kv_head, k_row, f_row, f_head, KEY, wide, channel
                    )
                    log_p = log_probability(query, keys, lse_row, key, low, high, scale)
                    z = log_p + rate[None] * (x - shift[None])
                    peak = tl.maximum(top, tl.max(z, 0))
                    known = tl.where(peak > float("-inf"), peak, 0.0)
                    summed = summed * tl.exp(top - known) + tl.sum(tl.exp(z - known[None]), 0)
                    top = peak
                free_energy = shift + (top + logarithm(tl.where(doubtful, summed, 1.0))) / rate
                if MIXED:
                    u = free_energy
                    if SHARED:
                        mean = tl.load(out + (token * heads + head) * (MEAN + FREE) + channel, there, other=0.0)
                        logit = row_logits(
                            inner, inner_up, inner_bias, token, head, channel, there, inner_row, SOURCE, RANK
                        )
                        u = mean.to(tl.float32) + tl.sigmoid(logit) * (free_energy - mean.to(tl.float32))
                    if GATED:
                        logit = row_logits(
                            outer, outer_up, outer_bias, token, head, column, column < SOURCE, outer_row, SOURCE, RANK,
                        )  # fmt: skip
                        s = softplus(logit)
                        r = tl.rsqrt(tl.sum(tl.where(column < SOURCE, s * s, 0.0)) / SOURCE + eps)
                        logit = row_logits(
                            outer, outer_up, outer_bias, token, head, FREE_AT + channel, there, outer_row, SOURCE, RANK,
                        )  # fmt: skip
                        u *= r * softplus(logit)
                    tl.store(o + (token * heads + head) * SOURCE + FREE_AT + channel, u, doubtful)
                else:
                    tl.store(exact + (token * heads + head) * FREE + channel, free_energy, doubtful)


@launched
def doubtful_queries_backward_kernel(
    q, k, f, lse, out, first_key, end_key, scheme, beta, exact, flags, d_free, d_q, d_theta, time, count, bound_batch,
    tiles,
    scale,
    q_row: tl.constexpr, k_row: tl.constexpr, f_row: tl.constexpr, f_head: tl.constexpr, d_q_row: tl.constexpr,
    heads: tl.constexpr, GROUP: tl.constexpr, KEY: tl.constexpr, MEAN: tl.constexpr, FREE: tl.constexpr,
    CAUSAL: tl.constexpr, TILE: tl.constexpr, KEYS: tl.constexpr,
    CHANNELS: tl.constexpr, WIDE: tl.constexpr, FLAGS: tl.constexpr,
):  # fmt: skip
    """Adds to d_q, and to d_theta of the first of FLAGS tiles, what goes through the doubtful entries of these."""
    head, first, batch = tl.program_id(0), tl.program_id(1) * FLAGS, tl.program_id(2)
    if any_raised(flags, (batch * heads + head) * tiles + first, tiles - first, FLAGS):
        channel, wide = tl.arange(0, CHANNELS), tl.arange(0, WIDE)
        there, kv_head = channel < FREE, head // GROUP
        _shift, narrow, rate = load_scheme(scheme, beta, batch, kv_head, heads // GROUP, FREE, channel, there)
        beta_sum = tl.zeros((CHANNELS,), tl.float32)
        for row in range(first * TILE, min((first + FLAGS) * TILE, time)):
            token, query, lse_row, doubtful = load_row(
                q, lse, out, narrow, there, batch, head, row, time, heads, q_row, KEY, MEAN, FREE, wide, channel
            )
            if tl.max(doubtful.to(tl.int32)) != 0:
                at = (token * heads + head) * FREE + channel
                free_energy = tl.load(exact + at, doubtful, other=0.0).to(tl.float32)
                d_row = tl.load(d_free + at, doubtful, other=0.0).to(tl.float32)
                q_sum, tilt = tl.zeros((WIDE,), tl.float32), tl.zeros((CHANNELS,), tl.float32)
                low, high = load_bounds(first_key, end_key, bound_batch, batch, row, time, CAUSAL)
                for start in range(low, high, KEYS):
                    key = start + tl.arange(0, KEYS)
                    keys, x, _, _, _ = load_keys(
                        k, f, there, batch, key, count, kv_head, k_row, f_row, f_head, KEY, wide, channel
                    )
                    log_p = log_probability(query, keys, lse_row, key, low, high, scale)
                    w, d_s = weights(log_p, x, free_energy, d_row, rate, doubtful)
                    q_sum += tl.sum(d_s[:, None] * keys, 0)
                    tilt += tl.sum(w * (x - free_energy[None]), 0)
                to = d_q + token * d_q_row + head * KEY + wide
                before = tl.load(to, wide < KEY, other=0.0).to(tl.float32)
                tl.store(to, before + scale * q_sum, wide < KEY)
                beta_sum += d_row / rate * tilt
        FREE_ROW: tl.constexpr = heads * FREE
        to = d_theta + (batch * tiles + first) * FREE_ROW + head * FREE + channel
        tl.store(to, tl.load(to, there, other=0.0) + beta_sum * slope_of_beta(rate), there)


@launched
def doubtful_keys_backward_kernel(
    q, k, f, lse, out, first_key, end_key, scheme, beta, exact, flags, d_free, d_k, d_f, raised, time, count,
    bound_batch, tiles, scale,
    q_row: tl.constexpr, k_row: tl.constexpr, f_row: tl.constexpr, f_head: tl.constexpr, d_k_row: tl.constexpr,
    d_f_row: tl.constexpr, d_f_head: tl.constexpr,
    heads: tl.constexpr, GROUP: tl.constexpr, KEY: tl.constexpr, MEAN: tl.constexpr, FREE: tl.constexpr,
    CAUSAL: tl.constexpr, TILE: tl.constexpr, KEYS: tl.constexpr,
    CHANNELS: tl.constexpr, WIDE: tl.constexpr, FLAGS: tl.constexpr,
):  # fmt: skip
    """Adds the same to d_k, and writes df: a program has every so many blocks of keys, and visits the rows that see
    them. raised (B, H_kv): whether there is any of it."""
    kv_head, batch = tl.program_id(0), tl.program_id(2)
    first = (batch * heads + kv_head * GROUP) * tiles  # the flags of a group of heads lie side by side
    found = any_raised(flags, first, GROUP * tiles, FLAGS)
    tl.store(raised + batch * (heads // GROUP) + kv_head, found.to(tl.int32))
    if found:
        channel, wide = tl.arange(0, CHANNELS), tl.arange(0, WIDE)
        there = channel < FREE
        _shift, narrow, rate = load_scheme(scheme, beta, batch, kv_head, heads // GROUP, FREE, channel, there)
        for block in range(tl.program_id(1), tl.cdiv(count, KEYS), tl.num_programs(1)):
            key = block * KEYS + tl.arange(0, KEYS)
            keys, x, key_token, keys_in, f_in = load_keys(
                k, f, there, batch, key, count, kv_head, k_row, f_row, f_head, KEY, wide, channel
            )
            k_sum, f_sum = tl.zeros((KEYS, WIDE), tl.float32), tl.zeros((KEYS, CHANNELS), tl.float32)
            for head in range(kv_head * GROUP, kv_head * GROUP + GROUP):
                for tile in range(block * KEYS // TILE if CAUSAL else 0, tiles):
                    if tl.load(flags + (batch * heads + head) * tiles + tile) != 0:
                        for row in range(tile * TILE, min(tile * TILE + TILE, time)):
                            token, query, lse_row, doubtful = load_row(
                                q, lse, out, narrow, there, batch, head, row, time, heads, q_row, KEY, MEAN, FREE,
                                wide, channel,
                            )  # fmt: skip
                            if tl.max(doubtful.to(tl.int32)) != 0:
                                at = (token * heads + head) * FREE + channel
                                free_energy = tl.load(exact + at, doubtful, other=0.0).to(tl.float32)
                                d_row = tl.load(d_free + at, doubtful, other=0.0).to(tl.float32)
                                low, high = load_bounds(first_key, end_key, bound_batch, batch, row, time, CAUSAL)
                                log_p = log_probability(query, keys, lse_row, key, low, high, scale)
                                w, d_s = weights(log_p, x, free_energy, d_row, rate, doubtful)
                                k_sum += d_s[:, None] * query[None]
                                f_sum += d_row[None] * w
            to_k = d_k + key_token * d_k_row + kv_head * KEY + wide[None]
            tl.store(to_k, tl.load(to_k, keys_in, other=0.0).to(tl.float32) + scale * k_sum, keys_in)
            tl.store(d_f + key_token * d_f_row + kv_head * d_f_head + channel[None], f_sum, f_in)
