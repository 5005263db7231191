"""One token of linear attention by a Triton kernel: the memory after it and what it reads, as `linear_step`."""

from __future__ import annotations

import torch
import triton.language as tl

from fem.ops.common.backend import on
from fem.ops.common.launch import cdiv, launched, next_power_of_2
from fem.ops.common.merge_kernels import (
    LOG_ZERO,
    NO_WEIGHT,
    NUMBERS,
    log_add,
    log_average,
    log_or_zero,
    log_sum,
    merged_energies,
    merged_means,
)
from fem.ops.common.read import Terms
from fem.ops.linear_attention.linear_log_space import LinearInputs


@launched
def linear_token_kernel(
    q, k, g, opens, v, f, beta, weight, mean, free, weight_after, mean_after, free_after, total, mean_read, free_read,
    heads: tl.constexpr, KEY: tl.constexpr, DECAYS: tl.constexpr, MEAN: tl.constexpr, FREE: tl.constexpr,
    OPENS: tl.constexpr, CELLS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of a head of a row: KEY cells that each keep log w, mean and F of BLOCK channels; DECAYS: of a head, 0, 1 or KEY.

    w'_c = e^{g_c} w_c + k_c        Z = sum_c q_c w'_c        mean = sum_c q_c w'_c mean'_c / Z        F likewise
    """
    row, cell = tl.program_id(0).to(tl.int64), tl.arange(0, CELLS)
    column, exists = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), cell < KEY
    at = row * KEY + cell
    left = tl.load(weight + at, exists, other=LOG_ZERO)
    if DECAYS > 0:
        left += tl.load(g + row * DECAYS + tl.minimum(cell, DECAYS - 1), exists, other=0.0).to(tl.float32)
    if OPENS:
        left = tl.where(tl.load(opens + row // heads) != 0, LOG_ZERO, left)
    new = log_or_zero(tl.load(k + at, exists, other=0.0).to(tl.float32))
    left, new = tl.maximum(left, LOG_ZERO), tl.maximum(new, LOG_ZERO)
    after, gain = tl.maximum(log_add(left, new), LOG_ZERO), (new - left)[:, None]
    scores = log_or_zero(tl.load(q + at, exists, other=0.0).to(tl.float32)) + after
    log_z, log_p = log_sum(tl.where(exists, scores, float("-inf")))
    if tl.program_id(1) == 0:
        tl.store(weight_after + at, after, exists)
        tl.store(total + row, log_z)
    if MEAN > 0:
        there = column < MEAN
        both, to = exists[:, None] & there[None], at[:, None] * MEAN + column[None]
        value = tl.load(v + row * MEAN + column, there, other=0.0).to(tl.float32)
        kept = merged_means(gain, tl.load(mean + to, both, other=0.0), value[None])
        tl.store(mean_after + to, kept, both)
        seen = tl.sum(tl.exp(log_p)[:, None] * tl.where(both, kept, 0.0), 0)
        tl.store(mean_read + row * MEAN + column, tl.where(log_z > NO_WEIGHT, seen, 0.0), there)
    if FREE > 0:
        there = column < FREE
        both, to = exists[:, None] & there[None], at[:, None] * FREE + column[None]
        rate = tl.load(beta + row % heads * FREE + column, there, other=1.0)
        value = tl.load(f + row * FREE + column, there, other=0.0).to(tl.float32)
        kept = merged_energies(gain, tl.load(free + to, both, other=0.0), value[None], rate[None])
        tl.store(free_after + to, kept, both)
        seen = log_average(log_p[:, None] + tl.zeros((CELLS, BLOCK), tl.float32), rate[None] * kept) / rate
        tl.store(free_read + row * FREE + column, tl.where(log_z > NO_WEIGHT, seen, 0.0), there)


def linear_token(memory: Terms, x: LinearInputs) -> tuple[Terms, Terms]:
    """`linear_step` over a memory in float32, without gradients; the reads are in the dtype of their values."""
    (batch, _, heads, keys), mean, free = x.q.shape, x.v.shape[-1], x.f.shape[-1]
    given = [None if part is None else part.contiguous() for part in (*x, *memory)]
    after = Terms(*(torch.empty_like(part, memory_format=torch.contiguous_format) for part in memory))
    reads = (memory.mean, 1), (x.v, mean), (x.f, free)
    read = Terms(*(like.new_empty(batch, 1, heads, n) for like, n in reads))
    cells = next_power_of_2(keys)
    block = min(max(1, NUMBERS // cells), next_power_of_2(max(mean, free, 1)))
    with on(x.q.device):
        linear_token_kernel[batch * heads, cdiv(max(mean, free, 1), block)](
            *(x.q if part is None else part for part in given), *after, *read, heads=heads, KEY=keys,
            DECAYS=0 if x.g is None else x.g.shape[-1], MEAN=mean, FREE=free, OPENS=x.opens is not None, CELLS=cells,
            BLOCK=block,
        )  # fmt: skip
    return read, after
