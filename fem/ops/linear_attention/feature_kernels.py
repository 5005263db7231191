"""Features of queries and keys in one launch on a GPU, and so their gradient.

    phi(x) = ReLU(RoPE(x)) + eps, computed in float32 and rounded once, to the dtype in which kernels multiply

PyTorch launches some twenty kernels for either, in float32 from memory to memory.
"""

from __future__ import annotations

import torch
import triton.language as tl
from jaxtyping import Float, Float64, Int
from torch import Tensor

from fem.ops.common.backend import on
from fem.ops.common.launch import cdiv, launched, next_power_of_2
from fem.ops.common.rope import turned

NUMBERS = 2048  # of a program, 16 for each of 128 threads


def features(
    q: Float[Tensor, "b t h d"],
    k: Float[Tensor, "b t h d"],
    position: Int[Tensor, " t"] | Int[Tensor, "b t"] | None,
    frequency: Float64[Tensor, " planes"] | None,
    factor: float,
    eps: float,
) -> tuple[Float[Tensor, "b t h d"], Float[Tensor, "b t h d"]]:
    """phi of queries and keys at these positions, in their dtype; without a frequency nothing is turned."""
    cos = sin = None
    if frequency is not None:
        cos = torch.empty(*position.shape, len(frequency), dtype=torch.float32, device=q.device)
        sin = torch.empty_like(cos)
        width = next_power_of_2(len(frequency))
        with on(q.device):
            angles_kernel[cdiv(position.numel(), NUMBERS // width),](
                position.contiguous(), frequency, cos, sin, position.numel(), factor, PLANES=len(frequency),
                ROWS=NUMBERS // width, HALF=width,
            )  # fmt: skip
    return _Features.apply(q, k, cos, sin, eps)


class _Features(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, cos, sin, eps):
        q, k = (x if x.stride()[2:] == (x.shape[3], 1) else x.contiguous() for x in (q, k))
        out = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k)]
        launch_features(q, k, *out, *out, cos, sin, eps, backward=False)
        ctx.eps = eps
        ctx.save_for_backward(*out, cos, sin)
        return tuple(out)

    @staticmethod
    def backward(ctx, *grads):
        *out, cos, sin = ctx.saved_tensors
        if torch.is_grad_enabled():
            passed = (d.float() * (y > torch.tensor(ctx.eps, dtype=y.dtype)) for d, y in zip(grads, out))
            if cos is not None:
                passed = (turned(d, cos.unsqueeze(-2), -sin.unsqueeze(-2)) for d in passed)
            return *(d.to(y.dtype) for d, y in zip(passed, out)), None, None, None
        grads = [d if d.stride()[2:] == (d.shape[3], 1) else d.contiguous() for d in grads]
        found = [torch.empty_like(y) for y in out]
        launch_features(*grads, *out, *found, cos, sin, ctx.eps, backward=True)
        return *found, None, None, None


def launch_features(q, k, q_known, k_known, q_out, k_out, cos, sin, eps: float, backward: bool) -> None:
    """Write to q_out and k_out, whose tokens may lie apart, what `features_kernel` finds."""
    batch, time, heads, width = q.shape
    half = next_power_of_2(width // 2)
    rows = max(1, NUMBERS // half)
    shared = cos is None or cos.ndim == 2
    with on(q.device):
        features_kernel[2 * heads * cdiv(batch * time, rows),](
            q, k, q_known, k_known, q_out, k_out, cos, sin, batch * time, time, time if shared else batch * time, heads,
            *q.stride()[:2], *k.stride()[:2], q_out.stride(1), k_out.stride(1), eps, WIDTH=width,
            TURNED=cos is not None, BACKWARD=backward, ROWS=rows, HALF=half,
        )  # fmt: skip


@launched
def angles_kernel(
    position, frequency, cos, sin, rows, factor, PLANES: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr
):
    """cos and sin of position frequency_j, computed in float64."""
    row, plane = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, HALF)
    there = (row < rows)[:, None] & (plane < PLANES)[None]
    place = tl.load(position + row, row < rows, other=0).to(tl.float64)
    angle = place[:, None] * tl.load(frequency + plane, plane < PLANES, other=0.0)[None]
    at = row[:, None] * PLANES + plane[None]
    tl.store(cos + at, (factor * tl.cos(angle)).to(tl.float32), there)
    tl.store(sin + at, (factor * tl.sin(angle)).to(tl.float32), there)


@launched
def features_kernel(
    q, k, q_known, k_known, q_out, k_out, cos, sin, rows, time, period, heads, q_batch, q_row, k_batch, k_row,
    q_out_row, k_out_row, eps, WIDTH: tl.constexpr, TURNED: tl.constexpr,
    BACKWARD: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """phi of q and k; BACKWARD: the gradients of q and k from those of phi, whose known values say where it rises.

    Of 2 heads programs the first half reads q, the others k.
    """
    head, row = tl.program_id(0) % heads, tl.program_id(0) // (2 * heads) * ROWS + tl.arange(0, ROWS)
    plane = tl.arange(0, HALF)
    there = (row < rows)[:, None] & (plane < WIDTH // 2)[None]
    row = row.to(tl.int64)[:, None]
    at, to = (row * heads + head) * WIDTH + plane[None], head * WIDTH + plane[None]
    if tl.program_id(0) % (2 * heads) < heads:
        x, known, y = q + row // time * q_batch + row % time * q_row, q_known + at, q_out + row * q_out_row + to
    else:
        x, known, y = k + row // time * k_batch + row % time * k_row, k_known + at, k_out + row * k_out_row + to
    x += to
    low = tl.load(x, there, other=0.0).to(tl.float32)
    high = tl.load(x + WIDTH // 2, there, other=0.0).to(tl.float32)
    if BACKWARD:
        flat = tl.zeros((1, 1), tl.float32) + eps
        flat = flat.to(y.dtype.element_ty).to(tl.float32)
        low = tl.where(tl.load(known, there, other=0.0).to(tl.float32) > flat, low, 0.0)
        high = tl.where(tl.load(known + WIDTH // 2, there, other=0.0).to(tl.float32) > flat, high, 0.0)
    if TURNED:
        angle = row % period * (WIDTH // 2) + plane[None]
        c, s = tl.load(cos + angle, there, other=0.0), tl.load(sin + angle, there, other=0.0)
        s = -s if BACKWARD else s
        low, high = low * c - high * s, high * c + low * s
    if not BACKWARD:
        low, high = tl.maximum(low, 0.0) + eps, tl.maximum(high, 0.0) + eps
    tl.store(y, low, there)
    tl.store(y + WIDTH // 2, high, there)
