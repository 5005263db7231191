"""The conditioner's kernels as one operator of torch, and when they are taken."""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fem.ops.common.backend import found
from fem.ops.common.launch import on, plain_tensors, watched
from fem.ops.common.operator import operator
from fem.ops.common.tokens import Tokens
from fem.ops.common.transforms import again_differentiable
from fem.ops.conditioner.plain_conditioner import ConvForm, plain_condition

MOST_CHANNELS = 256  # channels, which a program holds at once
NUMBERS = 2048  # of a tile in a program's registers: tokens times channels, at most
PROGRAMS = 1024  # enough for a card: chunks are of more tiles where rows are longer
FEWEST, MOST = 64, 256  # chunks of a row, each of which adds up what all before it end with
WARPS = 4  # measured on an H100: 58 us a train step of the four, 87 with 8, 68 with 2


def fits(backend: str, norm: nn.Module, projected: Tensor, hidden: Tensor | None) -> bool:
    """Whether the kernels run here: on CUDA, or in Triton's interpreter where backend is "triton".

    What PyTorch transforms or exports, sharded tensors, and a norm that somebody watches or has replaced, are the plain
    form's.
    """
    interpreted = backend == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
    if not (found("triton") and (projected.device.type == "cuda" or interpreted)) or backend in ("plain", "reference"):
        return False
    if type(norm) is not nn.LayerNorm or watched(norm):
        return False
    tensors = [x for x in (projected, norm.weight, norm.bias, hidden) if x is not None]
    return (
        len(tensors) >= 3
        and projected.shape[-1] <= 3 * MOST_CHANNELS
        and projected.numel() > 0
        and plain_tensors(*tensors)
    )


def fused_condition(
    projected: Tensor, tokens: Tokens, hidden: Tensor | None, norm: nn.LayerNorm, dtype: torch.dtype, form: ConvForm
) -> tuple[Tensor, Tensor]:
    """`plain_condition` by the kernels, h in dtype."""
    affine = norm.weight, norm.bias
    h, last, _ = _condition(projected, *affine, tokens.keep, tokens.start, hidden, norm.eps, dtype, *form)
    return h, last


class ChunkSizes:
    """Tiles of a row of tokens, and chunks of tiles: one for every program."""

    def __init__(self, projected: Tensor):
        self.batch, self.time, three = projected.shape
        self.width = three // 3
        columns = 1 << (self.width - 1).bit_length()
        rows = tile_rows(self.width)
        every = -(-self.time // rows)
        self.tiles = -(-every // min(max(PROGRAMS // self.batch, FEWEST), MOST))
        self.chunks = -(-every // self.tiles)
        self.grid = (self.batch * self.chunks,)
        self.count = (self.time, self.chunks, self.tiles)
        rows = rows if self.time > 16 else min(rows, 16)
        self.shape = {"width": self.width, "TIME": rows, "COLUMNS": columns, "num_warps": WARPS}
        self.ends = {"CHUNKS": min(64, NUMBERS // columns)}  # whose ends are loaded at a time


def tile_rows(width: int) -> int:
    """Tokens of a tile."""
    return min(64, max(8, NUMBERS >> (width - 1).bit_length()))


@operator(
    "conditioner(Tensor projected, Tensor weight, Tensor bias, Tensor? keep, Tensor? start, Tensor? hidden, float eps, "
    "ScalarType dtype, float length, bool bends) -> (Tensor, Tensor, Tensor)",
    waits=False,
)
def _condition(projected, weight, bias, keep, start, hidden, eps, dtype, length, bends):
    """h, the last state, and the state at the start of every tile, by one or two kernels."""
    from fem.ops.conditioner import conditioner_kernels as kernels

    projected, keep, start, hidden = _contiguous(projected, keep, start, hidden)
    sizes = ChunkSizes(projected)
    out, last, starts = _outputs(projected, weight, bias, keep, start, hidden, eps, dtype, length, bends)
    summaries = last.new_empty(sizes.batch, sizes.chunks, 2, sizes.width)
    with on(projected.device):
        if sizes.chunks > 1:
            kernels.sum_chunks_kernel[sizes.grid](projected, keep, start, summaries, *sizes.count, **sizes.shape)
        kernels.condition_kernel[sizes.grid](
            projected, weight, bias, keep, start, hidden, summaries, out, last, starts, *sizes.count, eps,
            length=length, bends=bends, **sizes.ends, **sizes.shape,
        )  # fmt: skip
    return out, last, starts


@_condition.register_fake
def _outputs(projected, weight, bias, keep, start, hidden, eps, dtype, length, bends):
    batch, time, width = projected.shape[0], projected.shape[1], projected.shape[2] // 3
    tiles = -(-time // tile_rows(width))
    new = lambda *shape: projected.new_empty(shape, dtype=torch.float32)  # noqa: E731
    return projected.new_empty((batch, time, width), dtype=dtype), new(batch, width), new(batch, tiles, width)


@operator(
    "conditioner_backward(Tensor grad, Tensor? d_last, Tensor projected, Tensor weight, Tensor bias, Tensor? keep, "
    "Tensor? start, Tensor starts, float eps, float length, bool bends) -> (Tensor, Tensor, Tensor)",
    waits=False,
)
def _condition_backward(grad, d_last, projected, weight, bias, keep, start, starts, eps, length, bends):
    """Gradients of the projections, of the norm, and of the state before the first token, by two kernels."""
    from fem.ops.conditioner import conditioner_kernels as kernels

    projected, keep, start, d_last = _contiguous(projected, keep, start, d_last)
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    sizes = ChunkSizes(projected)
    d_projected = torch.empty_like(projected)
    d_state = starts.new_empty(grad.shape)
    d_hidden = starts.new_empty(sizes.batch, sizes.width)
    summaries, parts = starts.new_empty(2, *sizes.grid, 2, sizes.width)
    strides = grad.stride()[:2]
    with on(projected.device):
        kernels.condition_backward_kernel[sizes.grid](
            grad, projected, weight, bias, keep, start, starts, d_state, d_projected, summaries, parts, *sizes.count,
            *strides, eps, length=length, bends=bends, **sizes.shape,
        )  # fmt: skip
        kernels.state_backward_kernel[sizes.grid](
            projected, keep, start, starts, d_state, d_last, summaries, d_projected, d_hidden, *sizes.count,
            **sizes.ends, **sizes.shape,
        )  # fmt: skip
    return d_projected, parts.sum(0), d_hidden


@_condition_backward.register_fake
def _(grad, d_last, projected, weight, bias, keep, start, starts, eps, length, bends):
    batch, width = grad.shape[0], grad.shape[2]
    new = lambda *shape: starts.new_empty(shape)  # noqa: E731
    return torch.empty_like(projected, memory_format=torch.contiguous_format), new(2, width), new(batch, width)


def _contiguous(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if x is None else x.contiguous() for x in tensors]


def _save_condition(ctx, inputs, output):
    ctx.eps, ctx.dtype, *ctx.form = inputs[6:]
    ctx.save_for_backward(*inputs[:6], output[2])
    ctx.set_materialize_grads(False)


def _differentiate_condition(ctx, grad, d_last, _):
    """First derivatives by the kernels, further ones by the plain form."""
    *tensors, starts = ctx.saved_tensors
    projected, weight, bias, keep, start, hidden = tensors
    if torch.is_grad_enabled():

        def by_torch(projected, weight, bias, hidden):
            norm = lambda x: F.layer_norm(x.float(), weight.shape, weight.float(), bias.float(), ctx.eps)  # noqa: E731
            h, last = plain_condition(
                projected, Tokens(keep, start, None, None), hidden, norm, ConvForm(*ctx.form), "plain"
            )
            return h.to(ctx.dtype), last

        *d_inputs, d_hidden = again_differentiable(by_torch, (projected, weight, bias, hidden), (grad, d_last))
        return *d_inputs, None, None, d_hidden, None, None, None, None
    if grad is None:
        grad = projected.new_zeros((*projected.shape[:2], len(weight)), dtype=ctx.dtype)
    d_projected, d_affine, d_hidden = _condition_backward(
        grad, d_last, projected, weight, bias, keep, start, starts, ctx.eps, *ctx.form
    )
    d_weight, d_bias = d_affine.to(weight.dtype).unbind()
    d_hidden = None if hidden is None else d_hidden.to(hidden.dtype)
    return d_projected, d_weight, d_bias, None, None, d_hidden, None, None, None, None


_condition.register_autograd(_differentiate_condition, setup_context=_save_condition)
