"""One token of a state space model by Triton kernels: its numbers from their logits, the memory after it and what it
reads, as `ssm_step`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from fem.ops.common.backend import on
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
from fem.ops.common.triton_math import exact_softplus
from fem.ops.ssm.ssm_log_space import SsmInputs


@triton.jit
def _softplus(x, y, log_y, at, there):
    """y = softplus(x) and log y, which below x = -30 is x itself, to within 5e-14."""
    logit = tl.load(x + at, there, other=0.0).to(tl.float32)
    number = exact_softplus(logit)
    tl.store(y + at, number, there)
    if log_y is not None:
        tl.store(log_y + at, tl.where(logit < -30.0, logit, tl.log(tl.maximum(number, 1e-14))), there)


@triton.jit
def ssm_numbers_kernel(
    delta, a, b, c, d, delta_out, a_out, b_out, c_out, d_out, log_delta, log_b, log_c, steps, states, channels,
    N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of BLOCK numbers of each: Delta, B, C, D = softplus(.), with the logarithms of the first three, and A =
    -softplus(.), turned from (D, N) to (N, D)."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    _softplus(delta, delta_out, log_delta, at, at < steps)
    _softplus(b, b_out, log_b, at, at < states)
    _softplus(c, c_out, log_c, at, at < states)
    _softplus(d, d_out, None, at, at < channels)
    rate = exact_softplus(tl.load(a + at, at < channels * N, other=0.0).to(tl.float32))
    tl.store(a_out + at % N * channels + at // N, -rate, at < channels * N)


def ssm_numbers(
    delta: Float[Tensor, "b 1 h d"],
    a: Float[Tensor, "h d n"],
    b: Float[Tensor, "b 1 n"],
    c: Float[Tensor, "b 1 n"],
    d: Float[Tensor, "h d"],
) -> tuple[tuple[Tensor, ...], tuple[Tensor, Tensor, Tensor]]:
    """`SelectiveSSM.forward` from the logits of one token: float32 numbers without gradients."""
    given = [x.contiguous() for x in (delta, a, b, c, d)]
    new = lambda *like: [torch.empty_like(x, dtype=torch.float32, memory_format=torch.contiguous_format) for x in like]  # noqa: E731
    delta_out, b_out, c_out, d_out, *logs = new(delta, b, c, d, delta, b, c)
    a_out = d_out.new_empty(a.shape[-1], *d.shape)
    largest = max(x.numel() for x in given)
    with on(delta.device):
        ssm_numbers_kernel[triton.cdiv(largest, NUMBERS),](
            *given, delta_out, a_out, b_out, c_out, d_out, *logs, delta.numel(), b.numel(), d.numel(),
            N=a.shape[-1], BLOCK=NUMBERS,
        )  # fmt: skip
    return (delta_out, a_out.movedim(0, -1), b_out, c_out, d_out), tuple(logs)


@triton.jit
def ssm_token_kernel(
    delta, log_delta, log_b, log_c, opens, v, f, a, skip, beta, weight, mean, free,
    weight_after, mean_after, free_after, total, mean_read, free_read, b_row, c_row,
    N: tl.constexpr, WIDTH: tl.constexpr, MEAN: tl.constexpr, FREE: tl.constexpr, OPENS: tl.constexpr,
    CELLS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of BLOCK channels of a row, the N states as cells: w'_n = e^{delta a_n} w_n + delta b_n, read with weights c_n.

    The cell behind them is the token itself, which is read through the skip.
    """
    row, cell = tl.program_id(1).to(tl.int64), tl.arange(0, CELLS)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    state, itself, exists = cell < N, (cell == N)[:, None], column < WIDTH
    inside, at = state[:, None] & exists[None], row * N + cell
    step = tl.load(delta + row * WIDTH + column, exists, other=0.0)
    into = tl.load(log_b + row * b_row + cell, state, other=0.0)
    out = tl.load(log_c + row * c_row + cell, state, other=0.0)
    height = tl.load(log_delta + row * WIDTH + column, exists, other=LOG_ZERO)
    decay = step[None] * tl.load(a + cell[:, None] * WIDTH + column[None], inside, other=0.0)
    if OPENS:
        decay = tl.where(tl.load(opens + row) != 0, LOG_ZERO, decay)
    to = at[:, None] * WIDTH + column[None]
    left = tl.maximum(tl.load(weight + to, inside, other=LOG_ZERO) + decay, LOG_ZERO)
    new = tl.maximum(height[None] + into[:, None], LOG_ZERO)
    after, gain = tl.maximum(log_add(left, new), LOG_ZERO), new - left
    tl.store(weight_after + to, after, inside)
    own = log_or_zero(tl.load(skip + column, exists, other=0.0))
    scores = tl.maximum(after + tl.maximum(out, LOG_ZERO)[:, None], LOG_ZERO)
    scores = tl.where(inside, scores, tl.where(itself, own[None], float("-inf")))
    log_z, log_p = log_sum(scores)
    tl.store(total + row * WIDTH + column, log_z, exists)
    if MEAN > 0:
        there, to = column < MEAN, at[:, None] * MEAN + column[None]
        both, value = state[:, None] & there[None], tl.load(v + row * MEAN + column, there, other=0.0)
        kept = tl.where(after > NO_WEIGHT, merged_means(gain, tl.load(mean + to, both, other=0.0), value[None]), 0.0)
        tl.store(mean_after + to, kept, both)
        seen = tl.sum(tl.exp(log_p) * tl.where(itself, value[None], tl.where(both, kept, 0.0)), 0)
        tl.store(mean_read + row * MEAN + column, tl.where(log_z > NO_WEIGHT, seen, 0.0), there)
    if FREE > 0:
        there, to = column < FREE, at[:, None] * FREE + column[None]
        both, value = state[:, None] & there[None], tl.load(f + row * FREE + column, there, other=0.0)
        rate = tl.load(beta + column, there, other=1.0)
        kept = merged_energies(gain, tl.load(free + to, both, other=0.0), value[None], rate[None])
        kept = tl.where(after > NO_WEIGHT, kept, 0.0)
        tl.store(free_after + to, kept, both)
        seen = log_average(log_p, rate[None] * tl.where(itself, value[None], kept)) / rate
        tl.store(free_read + row * FREE + column, tl.where(log_z > NO_WEIGHT, seen, 0.0), there)


def ssm_token(memory: Terms, x: SsmInputs) -> tuple[Terms, Terms]:
    """`ssm_step` of float32 tensors without gradients."""
    (batch, _, width), states, mean, free = x.delta.shape, x.a.shape[0], x.v.shape[-1], x.f.shape[-1]
    log_b, log_c = (part if part.stride(-1) == 1 else part.contiguous() for part in (x.log_b, x.log_c))
    delta, log_delta, *given = (
        x.delta if part is None else part.contiguous() for part in (x.delta, x.log_delta, *x[4:], *memory)
    )
    after = Terms(*(torch.empty_like(part, memory_format=torch.contiguous_format) for part in memory))
    read = Terms(*(delta.new_empty(batch, 1, n) for n in (width, mean, free)))
    cells = triton.next_power_of_2(states + 1)
    block = max(1, NUMBERS // cells)
    with on(delta.device):
        ssm_token_kernel[triton.cdiv(width, block), batch](
            delta, log_delta, log_b, log_c, *given, *after, *read, log_b.stride(0), log_c.stride(0), N=states,
            WIDTH=width, MEAN=mean, FREE=free, OPENS=x.opens is not None, CELLS=cells, BLOCK=block,
        )  # fmt: skip
    return read, after
