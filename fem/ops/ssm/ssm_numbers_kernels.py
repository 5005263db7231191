"""The numbers of a state space model by one Triton launch, and their gradient by another, where PyTorch takes forty.

    y = softplus(x)        dx = sigmoid(x) (dy + d(log y) / y)

Below x = -30 log y is x itself, to within 5e-14.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fem.ops.common.backend import on
from fem.ops.common.joined import tokens_apart
from fem.ops.common.launch import cdiv, launched
from fem.ops.common.merge_kernels import NUMBERS
from fem.ops.common.operator import again_differentiable
from fem.ops.common.triton_math import exact_softplus, quotient, sigmoid
from fem.ops.ssm.ssm_log_space import plain_numbers

LEAST_LOGIT = tl.constexpr(-30.0)


@triton.jit
def logits_at(x, first, step, size, width: tl.constexpr, row):
    """The logits x of tokens of that width, which lie a row apart, `step` numbers behind `first`, of 64 bits."""
    column = (first % width).to(tl.int32) + step
    token = first // width + column // width
    return tl.load(x + token * row + column % width, first + step < size, other=0.0).to(tl.float32)


@triton.jit
def positive(x, y, log_y, size, width: tl.constexpr, row, SIGN: tl.constexpr, BLOCK: tl.constexpr):
    """SIGN softplus(x), and its logarithm where there is one to be written, of this program's BLOCK numbers if any."""
    first, step = tl.program_id(0).to(tl.int64) * BLOCK, tl.arange(0, BLOCK)
    if first < size:
        at, logit = first + step, logits_at(x, first, step, size, width, row)
        number = exact_softplus(logit)
        tl.store(y + at, SIGN * number, at < size)
        if log_y is not None:
            tl.store(log_y + at, tl.where(logit < LEAST_LOGIT, logit, tl.log(tl.maximum(number, 1e-14))), at < size)


@triton.jit
def through_positive(x, d_y, d_log, d_x, size, width: tl.constexpr, row, SIGN: tl.constexpr, BLOCK: tl.constexpr):
    """The gradient of x, from those that there are, of the same numbers."""
    first, step = tl.program_id(0).to(tl.int64) * BLOCK, tl.arange(0, BLOCK)
    if first < size:
        at, total = first + step, tl.zeros((BLOCK,), tl.float32)
        logit = logits_at(x, first, step, size, width, row)
        slope = sigmoid(logit)
        if d_y is not None:
            total += SIGN * tl.load(d_y + at, at < size, other=0.0) * slope
        if d_log is not None:
            slope = tl.where(logit < LEAST_LOGIT, 1.0, quotient(slope, tl.maximum(exact_softplus(logit), 1e-14)))
            total += tl.load(d_log + at, at < size, other=0.0) * slope
        tl.store(d_x + at, total, at < size)


@launched
def numbers_kernel(
    delta, a, b, c, d, delta_out, a_out, b_out, c_out, d_out, log_delta, log_b, log_c, steps, rates, states, delta_row,
    b_row, c_row, channels: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK numbers of each: Delta, A, B, C and D, and the logarithms of Delta, B and C."""
    positive(delta, delta_out, log_delta, steps, channels, delta_row, 1.0, BLOCK)
    positive(a, a_out, None, rates, N, N, -1.0, BLOCK)
    positive(b, b_out, log_b, states, N, b_row, 1.0, BLOCK)
    positive(c, c_out, log_c, states, N, c_row, 1.0, BLOCK)
    positive(d, d_out, None, channels, channels, channels, 1.0, BLOCK)


@launched
def numbers_backward_kernel(
    delta, a, b, c, d, d_delta, d_a, d_b, d_c, d_d, d_log_delta, d_log_b, d_log_c, delta_out, a_out, b_out, c_out,
    d_out, steps, rates, states, delta_row, b_row, c_row, channels: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradients of BLOCK logits of each."""
    through_positive(delta, d_delta, d_log_delta, delta_out, steps, channels, delta_row, 1.0, BLOCK)
    through_positive(a, d_a, None, a_out, rates, N, N, -1.0, BLOCK)
    through_positive(b, d_b, d_log_b, b_out, states, N, b_row, 1.0, BLOCK)
    through_positive(c, d_c, d_log_c, c_out, states, N, c_row, 1.0, BLOCK)
    through_positive(d, d_d, None, d_out, channels, channels, channels, 1.0, BLOCK)


def numbers_by_kernels(*logits: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, Tensor, Tensor]]:
    """`ssm_numbers` in float32."""
    found = _Numbers.apply(*logits)
    return found[:5], found[5:]


class _Numbers(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *logits):
        logits = [x if tokens_apart(x) else x.contiguous() for x in logits]
        delta, _, b, c, _ = logits
        found = [_like(x, torch.float32) for x in (*logits, delta, b, c)]
        _launch(numbers_kernel, logits, found)
        ctx.save_for_backward(*logits)
        ctx.set_materialize_grads(False)
        return tuple(found)

    @staticmethod
    def backward(ctx, *grads):
        logits = ctx.saved_tensors
        if torch.is_grad_enabled():
            return tuple(again_differentiable(_flat_numbers, logits, grads))
        found = [_like(x, x.dtype) for x in logits]
        _launch(numbers_backward_kernel, logits, [*(d if d is None else d.contiguous() for d in grads), *found])
        return tuple(found)


def _flat_numbers(*logits: Tensor) -> list[Tensor]:
    numbers, logs = plain_numbers(*logits)
    return [*numbers, *logs]


def _like(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def _launch(kernel, logits, others) -> None:
    delta, a, b, c, d = logits
    sizes, rows = [x.numel() for x in (delta, a, b, d)], [x.stride(1) for x in (delta, b, c)]
    with on(delta.device):
        kernel[cdiv(max(sizes), NUMBERS),](*logits, *others, *sizes[:3], *rows, sizes[3], a.shape[-1], BLOCK=NUMBERS)
