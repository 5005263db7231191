"""Plain causal flash attention in the template of the read: what its registers and instructions stand beside."""

from __future__ import annotations

import triton
import triton.language as tl

from fem.ops.common.kernels.tiles import load_rows, store_rows


@triton.jit
def _attend(
    acc, peak, weight, start, q, k, values, rows, keys, k_stride, values_stride, scale_log2,
    D: tl.constexpr, BLOCK_K: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    columns = start + tl.arange(0, BLOCK_K)
    k_tile = load_rows(k, columns, k_stride, keys, D, D, EDGE)
    tile = load_rows(values, columns, values_stride, keys, D, D, EDGE)
    s = tl.dot(q, tl.trans(k_tile))
    if EDGE:
        s = tl.where(columns[None, :] <= rows[:, None], s, float("-inf"))
    higher = tl.maximum(peak, tl.max(s, 1) * scale_log2)
    p = tl.exp2(s * scale_log2 - higher[:, None])
    shrink = tl.exp2(peak - higher)
    acc = tl.dot(p.to(tile.dtype), tile, acc * shrink[:, None])
    return acc, higher, weight * shrink + tl.sum(p, 1)


@triton.jit
def plain_forward(
    q, k, values, mean, lse, queries, keys, heads, groups, scale_log2,
    D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """mean = softmax(scale q k^T) values with as many queries as keys, every width D, and the log2-sum-exp of rows."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    key_heads, key_head = heads // groups, head // groups
    q += (batch * queries * heads + head) * D
    k += (batch * keys * key_heads + key_head) * D
    values += (batch * keys * key_heads + key_head) * D
    rows = block * BLOCK_Q + tl.arange(0, BLOCK_Q)
    k_stride, values_stride = key_heads * D, key_heads * D
    q_tile = load_rows(q, rows, heads * D, queries, D, D, True)
    peak = tl.full([BLOCK_Q], -1e30, tl.float32)
    weight = tl.zeros([BLOCK_Q], tl.float32)
    acc = tl.zeros([BLOCK_Q, D], tl.float32)
    whole = block * BLOCK_Q // BLOCK_K * BLOCK_K
    for start in range(0, whole, BLOCK_K):
        acc, peak, weight = _attend(
            acc, peak, weight, start, q_tile, k, values, rows, keys, k_stride, values_stride, scale_log2,
            D, BLOCK_K, False,
        )  # fmt: skip
    for start in range(whole, tl.minimum((block + 1) * BLOCK_Q, keys), BLOCK_K):
        acc, peak, weight = _attend(
            acc, peak, weight, start, q_tile, k, values, rows, keys, k_stride, values_stride, scale_log2,
            D, BLOCK_K, True,
        )  # fmt: skip
    out = mean + (batch * queries * heads + head) * D
    store_rows(out, rows, heads * D, queries, acc / weight[:, None], D, D)
    tl.store(lse + (batch * heads + head) * queries + rows, peak + tl.log2(weight), mask=rows < queries)
