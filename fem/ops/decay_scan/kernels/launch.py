"""The decaying sum by our kernels: their grids, their launches and their gradients."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from jaxtyping import Float
from torch import Tensor

from fem.ops.common.backend import triton_interprets
from fem.ops.common.kernels.launch import on_its_device
from fem.ops.decay_scan.kernels import scan as kernels

CHUNK = 64  # tokens of a program


def decay_scan(
    log_decay: Float[Tensor, "b t c"], u: Float[Tensor, "b t c"], start: Float[Tensor, "b c"]
) -> Float[Tensor, "b t c"]:
    """h_t = exp(log_decay_t) h_{t-1} + u_t from `start`, in u's dtype, summed in float32.

    Gradients repeat bit by bit and cannot be differentiated again. Raises ValueError on float64.
    """
    log_decay, u = readable(log_decay, u)
    return _forward(log_decay, u, start.float().contiguous())


def readable(*tensors: Tensor | None) -> list[Tensor | None]:
    """The tensors as the scan kernels take them: contiguous, and in float32 under Triton's interpreter."""
    if any(x is not None and x.dtype == torch.float64 for x in tensors):
        raise ValueError("backend='triton' computes in float32, got float64 inputs; use backend='auto'.")
    lift = torch.Tensor.float if triton_interprets() else lambda x: x
    return [None if x is None else lift(x).contiguous() for x in tensors]


class Cut(NamedTuple):
    """Grids and block sizes of the kernels that take one chunk each, and of those (carry) that go over the chunks."""

    grid: tuple[int, int, int]
    blocks: dict[str, int]
    carry_grid: tuple[int, int]
    carry_blocks: dict[str, int]

    @classmethod
    def of(cls, batch: int, time: int, channels: int) -> Cut:
        block, carry = min(128, max(32, triton.next_power_of_2(channels))), 32
        launch = {"num_warps": block // 32, "enable_fp_fusion": True}  # a thread takes one channel
        return cls(
            (triton.cdiv(channels, block), triton.cdiv(time, CHUNK), batch),
            {"CHUNK": CHUNK, "BLOCK": block} | launch,
            (triton.cdiv(channels, carry), batch),
            {"BLOCK": carry} | launch | {"num_warps": 1},
        )


@torch.library.custom_op(
    "fem::decay_scan_triton", mutates_args=(), schema="(Tensor log_decay, Tensor u, Tensor start) -> Tensor"
)
@on_its_device
def _forward(log_decay, u, start):
    cut, sizes = Cut.of(*u.shape), u.shape[1:]
    entering = _entering(kernels.scan_sums, (log_decay, u), start, cut, sizes, backwards=False)
    h = torch.empty_like(u)
    kernels.scan_chunks[cut.grid](log_decay, u, entering, h, *sizes, **cut.blocks)
    return h


@_forward.register_fake
def _(log_decay, u, start):
    return torch.empty_like(u)


@torch.library.custom_op(
    "fem::decay_scan_triton_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor log_decay, Tensor h, Tensor start) -> (Tensor d_decay, Tensor d_u, Tensor d_start)",
)
@on_its_device
def _backward(grad, log_decay, h, start):
    cut, sizes, grad = Cut.of(*h.shape), h.shape[1:], grad.contiguous()
    behind = torch.zeros_like(start)
    entering = _entering(kernels.gradient_sums, (log_decay, grad), behind, cut, sizes, backwards=True)
    d_decay, d_u, d_start = torch.empty_like(log_decay), torch.empty_like(h), torch.empty_like(start)
    outputs = (d_decay, d_u, d_start)
    kernels.gradient_chunks[cut.grid](log_decay, grad, h, start, entering, *outputs, *sizes, **cut.blocks)
    return outputs


@_backward.register_fake
def _(grad, log_decay, h, start):
    return tuple(torch.empty_like(x) for x in (log_decay, h, start))


def _entering(sums, inputs, start, cut: Cut, sizes, backwards: bool) -> Tensor:
    """What enters each chunk, (B, chunks, C)."""
    _, chunks, batch = cut.grid
    if chunks == 1:
        return start
    through, added = start.new_empty(2, batch, chunks, start.shape[-1])
    sums[cut.grid](*inputs, through, added, *sizes, **cut.blocks)
    kernels.scan_carry[cut.carry_grid](through, added, start, chunks, start.shape[-1], backwards, **cut.carry_blocks)
    return added


def _save(ctx, inputs, output):
    log_decay, _, start = inputs
    ctx.save_for_backward(log_decay, output, start)


_forward.register_autograd(lambda ctx, grad: _backward(grad, *ctx.saved_tensors), setup_context=_save)
