"""Single entries of the free energy again, from the definition in float64, and their gradients: on the device alone.

    L_tj = log sum_i exp(s_ti + beta_j v_ij)      Z_t = log sum_i exp(s_ti)     F_tj = (L_tj - Z_t) / beta_j     (Eq. 4)
    W_i = exp(s_ti + beta_j v_ij - L_tj)          p_i = exp(s_ti - Z_t)
    dF/dv_ij = W_i      dF/ds_ti = (W_i - p_i) / beta_j      dF/dbeta_j = sum_i W_i (v_ij - F_tj) / beta_j

A program looks at the flags of ROWS queries of one head and leaves where none is set, so that the host need not know
whether any is. Where one is, it takes that row alone, KEYS keys at a time. q, k, v and bias come with their strides,
all else is contiguous; `first` and `end`, if given, are the keys that a query sees, by row (MANY: of each batch).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def free_energies(
    free, doubtful, q, k, v, beta, bias, first, end, out, normaliser, found, counter,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, bias_b, bias_h, bias_t, bias_i, queries, keys, heads,
    GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, SCALE: tl.constexpr, CAUSAL: tl.constexpr,
    MANY: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """out: `free` with the doubtful entries computed again. found: how many, (B, H, blocks); counter: their sum over
    all reads; normaliser: Z of the rows that have one, (B, H, T_q)."""
    block, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    features, channels = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    inside, top = channels < V, block * ROWS
    rows = top + tl.arange(0, ROWS)
    tile = ((batch * queries + rows[:, None]) * heads + head) * V + channels[None, :]
    there = (rows < queries)[:, None] & inside[None, :]
    flags = tl.load(doubtful + tile, mask=there, other=0).to(tl.int32)
    tl.store(out + tile, tl.load(free + tile, mask=there, other=0.0), mask=there & (flags == 0))
    many = tl.sum(flags)
    tl.store(found + (batch * heads + head) * tl.num_programs(0) + block, many)
    if many > 0:
        tl.atomic_add(counter, many.to(tl.int64))
        q += batch * q_b + head * q_h
        k += batch * k_b + head // GROUP * k_h
        v += batch * v_b + head // GROUP * v_h
        bias_at = batch * bias_b + head * bias_h
        rate = tl.load(beta + head // GROUP * V + channels, mask=inside, other=1.0).to(tl.float64)
        for row in range(top, tl.minimum(top + ROWS, queries)):
            place = ((batch * queries + row) * heads + head) * V + channels
            flag = tl.load(doubtful + place, mask=inside, other=0).to(tl.int32)
            if tl.max(flag) > 0:
                query = tl.load(q + tl.cast(row, tl.int64) * q_t + features, mask=features < K, other=0.0).to(
                    tl.float64
                )
                low, high = seen_by(row, batch, first, end, queries, keys, CAUSAL, MANY)
                most_s, sum_s = tl.full([1], -float("inf"), tl.float64), tl.zeros([1], tl.float64)
                most, total = tl.full([BLOCK_V], -float("inf"), tl.float64), tl.zeros([BLOCK_V], tl.float64)
                for start in range(low, high, KEYS):
                    at = start + tl.arange(0, KEYS)
                    s, _ = scores_of(
                        query, k, bias, bias_at, row, at, at < high, k_t, bias_t, bias_i, K, SCALE, features
                    )
                    z = s[:, None] + rate[None, :] * values_of(v, at, at < high, v_t, V, channels)
                    most_s, sum_s = added(most_s, sum_s, s[:, None])
                    most, total = added(most, total, z)
                Z = most_s + tl.log(sum_s)
                exact = tl.where(sum_s > 0, (most + tl.log(total) - Z) / rate, 0.0)
                tl.store(out + place, exact, mask=inside & (flag > 0))
                tl.store(normaliser + (batch * heads + head) * queries + row + tl.arange(0, 1), Z)


@triton.jit
def gradients(
    grad, doubtful, q, k, v, beta, bias, first, end, free, normaliser, found, dq, dk, dv, dbeta,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, bias_b, bias_h, bias_t, bias_i, queries, keys, heads,
    GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, SCALE: tl.constexpr, CAUSAL: tl.constexpr,
    MANY: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """Gradients of the entries computed again: dq and dbeta (B, H, blocks of rows, V) by the first programs of a head,
    dk and dv by the others, of KEYS keys each, over all rows and heads that read them; 0 where no flag is set."""
    block, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    features, channels = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    blocks = tl.cdiv(queries, ROWS)
    if block < blocks:
        inside = channels < V
        q += batch * q_b + head * q_h
        k += batch * k_b + head // GROUP * k_h
        v += batch * v_b + head // GROUP * v_h
        bias_at = batch * bias_b + head * bias_h
        rate = tl.load(beta + head // GROUP * V + channels, mask=inside, other=1.0).to(tl.float64)
        many = tl.load(found + (batch * heads + head) * blocks + block)
        of_beta = tl.zeros([BLOCK_V], tl.float64)
        for row in range(block * ROWS, tl.minimum(block * ROWS + ROWS, queries)):
            of_query = tl.zeros([BLOCK_K], tl.float64)
            if many > 0:
                place = ((batch * queries + row) * heads + head) * V + channels
                flag = tl.load(doubtful + place, mask=inside, other=0).to(tl.int32)
                if tl.max(flag) > 0:
                    query = tl.load(q + tl.cast(row, tl.int64) * q_t + features, mask=features < K, other=0.0).to(
                        tl.float64
                    )
                    g = tl.load(grad + place, mask=inside & (flag > 0), other=0.0).to(tl.float64) / rate
                    F = tl.load(free + place, mask=inside, other=0.0).to(tl.float64)
                    low, high, Z = weighed(row, batch, head, heads, first, end, normaliser, queries, keys, CAUSAL, MANY)
                    for start in range(low, high, KEYS):
                        at = start + tl.arange(0, KEYS)
                        s, key = scores_of(
                            query, k, bias, bias_at, row, at, at < high, k_t, bias_t, bias_i, K, SCALE, features
                        )
                        x = values_of(v, at, at < high, v_t, V, channels)
                        W, p = weights_of(s, x, rate, F, Z, flag)
                        of_query += tl.sum(tl.sum(g[None, :] * (W - p[:, None]), 1)[:, None] * key, 0)
                        of_beta += g * tl.sum(W * (x - F[None, :]), 0)
            place = ((batch * queries + row) * heads + head) * K + features
            tl.store(dq + place, SCALE * of_query, mask=features < K)
        tl.store(dbeta + ((batch * heads + head) * blocks + block) * V + channels, of_beta, mask=inside)
    elif head < heads // GROUP:
        _of_keys(
            grad, doubtful, q + batch * q_b, k + batch * k_b + head * k_h, v + batch * v_b + head * v_h, beta, bias,
            first, end, free, normaliser, found, dk, dv, q_t, q_h, k_t, v_t, bias_b, bias_h, bias_t, bias_i,
            queries, keys, heads, block - blocks, head, batch, blocks, features, channels,
            GROUP, K, V, SCALE, CAUSAL, MANY, ROWS, KEYS, BLOCK_K, BLOCK_V, BLOCKS,
        )  # fmt: skip


@triton.jit
def _of_keys(
    grad, doubtful, q, k, v, beta, bias, first, end, free, normaliser, found, dk, dv, q_t, q_h, k_t, v_t,
    bias_b, bias_h, bias_t, bias_i, queries, keys, heads, block, kv_head, batch, blocks, features, channels,
    GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, SCALE: tl.constexpr, CAUSAL: tl.constexpr,
    MANY: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """dk and dv of KEYS keys of one key head."""
    inside, at = channels < V, block * KEYS + tl.arange(0, KEYS)
    of_key, of_value = tl.zeros([KEYS, BLOCK_K], tl.float64), tl.zeros([KEYS, BLOCK_V], tl.float64)
    for head in range(kv_head * GROUP, kv_head * GROUP + GROUP):
        for part in range(0, blocks, BLOCKS):
            flagged = found + (batch * heads + head) * blocks
            some = tl.load(flagged + part + tl.arange(0, BLOCKS), mask=part + tl.arange(0, BLOCKS) < blocks, other=0)
            if tl.max(some) > 0:
                rate = tl.load(beta + kv_head * V + channels, mask=inside, other=1.0).to(tl.float64)
                for here in range(part, tl.minimum(part + BLOCKS, blocks)):
                    if tl.load(flagged + here) > 0:
                        for row in range(here * ROWS, tl.minimum(here * ROWS + ROWS, queries)):
                            place = ((batch * queries + row) * heads + head) * V + channels
                            flag = tl.load(doubtful + place, mask=inside, other=0).to(tl.int32)
                            if tl.max(flag) > 0:
                                query = q + tl.cast(row, tl.int64) * q_t + head * q_h + features
                                query = tl.load(query, mask=features < K, other=0.0).to(tl.float64)
                                g = tl.load(grad + place, mask=inside & (flag > 0), other=0.0).to(tl.float64)
                                F = tl.load(free + place, mask=inside, other=0.0).to(tl.float64)
                                low, high, Z = weighed(
                                    row, batch, head, heads, first, end, normaliser, queries, keys, CAUSAL, MANY
                                )
                                bias_at = batch * bias_b + head * bias_h
                                seen = (at >= low) & (at < high)
                                s, _ = scores_of(
                                    query, k, bias, bias_at, row, at, seen, k_t, bias_t, bias_i, K, SCALE, features
                                )
                                W, p = weights_of(s, values_of(v, at, seen, v_t, V, channels), rate, F, Z, flag)
                                of_value += g[None, :] * W
                                ds = tl.sum((g / rate)[None, :] * (W - p[:, None]), 1)
                                of_key += ds[:, None] * (SCALE * query)[None, :]
    place, there = (batch * keys + at) * (heads // GROUP) + kv_head, at < keys
    tl.store(dk + place[:, None] * K + features[None, :], of_key, mask=there[:, None] & (features < K)[None, :])
    tl.store(dv + place[:, None] * V + channels[None, :], of_value, mask=there[:, None] & inside[None, :])


@triton.jit
def seen_by(row, batch, first, end, queries, keys, CAUSAL: tl.constexpr, MANY: tl.constexpr):
    """The keys low <= i < high that a row sees."""
    if first is None:
        low = row * 0
        if CAUSAL:
            high = row + keys - queries + 1
        else:
            high = low + keys
    else:
        place = tl.cast(row, tl.int64)
        if MANY:
            place += batch * queries
        low, high = tl.load(first + place), tl.load(end + place)
    return low, high


@triton.jit
def weighed(
    row, batch, head, heads, first, end, normaliser, queries, keys, CAUSAL: tl.constexpr, MANY: tl.constexpr
):  # fmt: skip
    """The keys that a row gives weight to, and its normaliser: none where it sees nothing."""
    low, high = seen_by(row, batch, first, end, queries, keys, CAUSAL, MANY)
    Z = tl.load(normaliser + (batch * heads + head) * queries + row)
    something = tl.abs(Z) < float("inf")
    return low, tl.where(something, high, low), tl.where(something, Z, 0.0)


@triton.jit
def scores_of(
    query, k, bias, bias_at, row, at, seen, k_t, bias_t, bias_i, K: tl.constexpr, SCALE: tl.constexpr, features
):  # fmt: skip
    """The scores of KEYS keys, -inf where not seen, and the keys."""
    key = k + at[:, None].to(tl.int64) * k_t + features[None, :]
    key = tl.load(key, mask=seen[:, None] & (features < K)[None, :], other=0.0).to(tl.float64)
    s = SCALE * tl.sum(key * query[None, :], 1)
    if bias is not None:
        place = bias_at + tl.cast(row, tl.int64) * bias_t + at.to(tl.int64) * bias_i
        s += tl.load(bias + place, mask=seen, other=0.0).to(tl.float64)
    return tl.where(seen, s, -float("inf")), key


@triton.jit
def values_of(v, at, seen, v_t, V: tl.constexpr, channels):
    """The values of KEYS keys; 0 for one that is not finite, as nobody who sees it is in doubt."""
    x = v + at[:, None].to(tl.int64) * v_t + channels[None, :]
    x = tl.load(x, mask=seen[:, None] & (channels < V)[None, :], other=0.0).to(tl.float64)
    return tl.where(tl.abs(x) < float("inf"), x, 0.0)


@triton.jit
def weights_of(s, x, rate, F, Z, flag):
    """W (0 where an entry is not flagged: its F is another's) and p (KEYS)."""
    W = tl.exp(tl.where(flag[None, :] > 0, s[:, None] + rate[None, :] * (x - F[None, :]) - Z, -float("inf")))
    return W, tl.exp(s - Z)


@triton.jit
def added(most, total, z):
    """log-sum-exp over the rows of z, added to total e^most."""
    larger = tl.maximum(most, tl.max(z, 0))
    shift = tl.where(larger > -float("inf"), larger, 0.0)
    return larger, total * tl.exp(most - shift) + tl.sum(tl.exp(z - shift[None, :]), 0)
