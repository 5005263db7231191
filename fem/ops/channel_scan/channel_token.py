"""One token of a channel scan by a Triton kernel, as `channel_step`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fem.ops.common.launch import on
from fem.ops.common.merge_kernels import LOG_ZERO, NO_WEIGHT, log_add, merged_energies, merged_means
from fem.ops.common.read import Terms

BLOCK = 128  # channels of a program


@triton.jit
def channel_token_kernel(
    x, a, v, f, beta, weight, mean, free, weight_after, mean_after, free_after,
    WIDTH: tl.constexpr, MEAN: tl.constexpr, FREE: tl.constexpr, DECAYS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """w' = e^a w + e^x of BLOCK channels of a row, and mean' and F', which are 0 where there is no weight."""
    row, column = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at, exists = row * WIDTH + column, column < WIDTH
    left, new = tl.load(weight + at, exists, other=LOG_ZERO), tl.load(x + at, exists, other=LOG_ZERO)
    if DECAYS:
        left += tl.load(a + at, exists, other=0.0)
    left, new = tl.maximum(left, LOG_ZERO), tl.maximum(new, LOG_ZERO)
    after, gain = tl.maximum(log_add(left, new), LOG_ZERO), new - left
    tl.store(weight_after + at, after, exists)
    if MEAN > 0:
        to, there = row * MEAN + column, column < MEAN
        value = merged_means(gain, tl.load(mean + to, there, other=0.0), tl.load(v + to, there, other=0.0))
        tl.store(mean_after + to, tl.where(after > NO_WEIGHT, value, 0.0), there)
    if FREE > 0:
        to, there, rate = row * FREE + column, column < FREE, tl.load(beta + column, column < FREE, other=1.0)
        value = merged_energies(gain, tl.load(free + to, there, other=0.0), tl.load(f + to, there, other=0.0), rate)
        tl.store(free_after + to, tl.where(after > NO_WEIGHT, value, 0.0), there)


def channel_token(memory: Terms, x: Tensor, a: Tensor | None, v: Tensor, f: Tensor, beta: Tensor) -> Terms:
    """`cell_step` of float32 tensors (B, 1, C) without gradients."""
    width = x.shape[-1]
    given = [x if part is None else part.contiguous() for part in (x, a, v, f, beta, *memory)]
    after = Terms(*(torch.empty_like(part, memory_format=torch.contiguous_format) for part in memory))
    with on(x.device):
        channel_token_kernel[triton.cdiv(width, BLOCK), x.shape[0]](
            *given, *after, WIDTH=width, MEAN=v.shape[-1], FREE=f.shape[-1], DECAYS=a is not None, BLOCK=BLOCK
        )
    return after
