"""The conditioner's kernels as one operator of torch, and when they are taken."""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fem.ops.common.backend import found, multiplies_bfloat16, on, plain_map, plain_tensors, watched
from fem.ops.common.operator import again_differentiable, operator
from fem.ops.common.precision import product_dtype
from fem.ops.common.tokens import Tokens
from fem.ops.conditioner.plain_conditioner import ConvForm, plain_condition

_TENSORS = 10  # that the operator takes
MOST_BYTES = 512  # of a token's channels, as they are multiplied: a program holds them at once
NUMBERS = 2048  # of a tile in a program's registers, tokens times channels, where these leave it 16 tokens
LEAST = 16  # tokens and channels of a tile: tensor cores multiply no fewer
FORWARD, BACKWARD = (32, 3), (64, 2)  # inputs that are multiplied at a time at most, and how many such blocks of W are
BLOCK, SHARED = 8 << 10, 72 << 10  # on their way; their bytes for each of f, u and a, and of all
PROGRAMS = 1024  # enough for a card: chunks are of more tiles where rows are longer
FEWEST, MOST = 64, 256  # chunks of a row, each of which adds up what all before it end with
WARPS = 4  # measured on an H100 before products were part of the kernels: 58 us a train step, 87 with 8, 68 with 2


def fits(
    backend: str, x: Tensor, hidden: Tensor | None, norm_in: nn.Module, project: nn.Module, norm: nn.Module
) -> bool:
    """Whether the kernels run here: on CUDA, or in Triton's interpreter where backend is "triton".

    What PyTorch transforms or exports, sharded tensors, and maps that somebody watches or has replaced, are the plain
    form's.
    """
    interpreted = backend == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
    if not (found("triton") and (x.device.type == "cuda" or interpreted)) or backend in ("plain", "reference"):
        return False
    if x.device.type == "cuda" and not (torch.version.hip is None and multiplies_bfloat16(x.device)):
        return False  # nor does another card multiply float32 in parts
    norms = [norm] if type(norm_in) is nn.Identity else [norm, norm_in]
    if not all(type(one) is nn.LayerNorm and one.bias is not None for one in norms):
        return False
    if not plain_map(project) or any(map(watched, [norm, norm_in])):
        return False
    tensors = [hidden, project.weight, project.bias, *(y for one in norms for y in (one.weight, one.bias))]
    narrow = project.out_features // 3 * product_dtype(x).itemsize <= MOST_BYTES
    return narrow and x.numel() > 0 and plain_tensors(x, *tensors)


def fused_condition(
    x: Tensor,
    tokens: Tokens,
    hidden: Tensor | None,
    norm_in: nn.Module,
    project: nn.Linear,
    norm: nn.LayerNorm,
    form: ConvForm,
) -> tuple[Tensor, Tensor]:
    """[x, h] and h~_T by the kernels: h is `plain_condition` of project(norm_in(x))."""
    first = (None, None, 0.0) if type(norm_in) is nn.Identity else (norm_in.weight, norm_in.bias, norm_in.eps)
    dtype = product_dtype(x)
    weights = *first[:2], project.weight.to(dtype), project.bias, norm.weight, norm.bias
    inputs = x, *weights, hidden, tokens.keep, tokens.start, first[2], norm.eps, dtype, *form
    features, last, *_ = _operator(*inputs) if torch.compiler.is_compiling() else _Condition.apply(*inputs)
    return features, last


class ChunkSizes:
    """Tiles of a row of tokens, and chunks of tiles: one for every program."""

    def __init__(self, batch: int, time: int, width: int):
        self.batch, self.time, self.width = batch, time, width
        columns, rows = _columns(width), tile_rows(width)
        every = -(-time // rows)
        self.tiles = -(-every // min(max(PROGRAMS // batch, FEWEST), MOST))
        self.chunks = -(-every // self.tiles)
        self.grid = (batch * self.chunks,)
        self.count = (time, self.chunks, self.tiles)
        rows = rows if time > LEAST else LEAST
        warps = WARPS if columns <= 64 else 2 * WARPS
        self.shape = {"width": width, "TIME": rows, "COLUMNS": columns, "num_warps": warps}
        self.ends = {"CHUNKS": min(64, NUMBERS // columns)}  # whose ends are loaded at a time


def _columns(width: int) -> int:
    return max(LEAST, 1 << (width - 1).bit_length())


def tile_rows(width: int) -> int:
    """Tokens of a tile."""
    return min(32, max(LEAST, NUMBERS // _columns(width)))


def product_sizes(inputs: int, width: int, dtype: torch.dtype, step: int, stages: int) -> dict[str, int | str]:
    """How many inputs are multiplied at a time, how many such blocks of W are on their way, and how."""
    row, precision = _columns(width) * dtype.itemsize, "ieee"
    step = max(LEAST, min(step, BLOCK // row))
    if dtype == torch.float32:
        precision = "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "tf32x3"
    stages = max(1, min(stages, SHARED // (3 * step * row)))
    return {"inputs": inputs, "STEP": step, "STAGES": stages, "PRECISION": precision}


def _forward(
    x, in_weight, in_bias, map_weight, map_bias, weight, bias, hidden, keep, start, in_eps, eps, dtype, length, bends
):
    """[x, h], the last state; and what the backward needs, x^, [f, u, a] and the state at the start of every tile."""
    from fem.ops.conditioner import conditioner_kernels as kernels

    x, map_weight, map_bias, hidden, keep, start = _contiguous(x, map_weight, map_bias, hidden, keep, start)
    inputs, sizes = x.shape[2], ChunkSizes(*x.shape[:2], len(weight))
    features, last, normed, starts = _outputs(x, len(weight), dtype)
    projected = normed.new_empty(*x.shape[:2], 3 * sizes.width)
    summaries = last.new_empty(sizes.batch, sizes.chunks, 2, sizes.width)
    row, form = features.shape[2], {"length": length, "bends": bends}
    with on(x.device):
        kernels.project_kernel[sizes.grid](
            x, in_weight, in_bias, map_weight, map_bias, weight, bias, keep, start, hidden, features, normed, projected,
            summaries, last, starts, *sizes.count, row, in_eps, eps, ALONE=sizes.chunks * sizes.tiles == 1, **form,
            **product_sizes(inputs, sizes.width, dtype, *FORWARD), **sizes.shape,
        )  # fmt: skip
        if sizes.chunks > 1:
            kernels.condition_kernel[sizes.grid](
                projected, weight, bias, keep, start, hidden, summaries, features[..., inputs:], last, starts,
                *sizes.count, row, eps, **form, **sizes.ends, **sizes.shape,
            )  # fmt: skip
    return features, last, normed, projected, starts


def _outputs(x: Tensor, width: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """New tensors for [x, h], the last state, x^ and the states at the start of tiles."""
    batch, time, inputs = x.shape
    state = lambda *shape: x.new_empty(shape, dtype=torch.float32)  # noqa: E731
    starts = state(batch, -(-time // tile_rows(width)), width)
    return x.new_empty(batch, time, inputs + width), state(batch, width), x.new_empty(x.shape, dtype=dtype), starts


def _backward(
    grad, d_last, x, in_weight, map_weight, weight, bias, keep, start, normed, projected, starts, in_eps, eps, length,
    bends,
):  # fmt: skip
    """Gradients of x, of the map's weight, of the state before the first token, and side by side of the small ones:
    weight and bias, the map's bias, and the first norm's weight and bias."""
    from fem.ops.common.part_kernels import sum_all
    from fem.ops.conditioner import conditioner_kernels as kernels

    grad, x, map_weight, keep, start, d_last = _contiguous(grad, x, map_weight, keep, start, d_last)
    inputs, sizes = x.shape[2], ChunkSizes(*x.shape[:2], len(weight))
    programs, row, width = sizes.grid[0], grad.shape[2], sizes.width
    d_projected, d_x = torch.empty_like(projected), torch.empty_like(x)
    d_state, d_hidden = starts.new_empty(*x.shape[:2], width), starts.new_empty(sizes.batch, width)
    summaries, parts = starts.new_empty(programs, 2, width), starts.new_empty(programs, 5 * width)
    norm_parts = None if in_weight is None else starts.new_empty(programs * sizes.tiles, 2 * inputs)
    small = weight.new_empty(5 * width + (0 if in_weight is None else 2 * inputs))
    sums = [(parts, small[: 5 * width])] + ([] if in_weight is None else [(norm_parts, small[5 * width :])])
    with on(x.device):
        kernels.condition_backward_kernel[sizes.grid](
            grad[..., inputs:], projected, weight, bias, keep, start, starts, d_state, d_projected, summaries, parts,
            *sizes.count, row, 5 * width, eps, length=length, bends=bends, **sizes.shape,
        )  # fmt: skip
        kernels.state_backward_kernel[sizes.grid](
            projected, keep, start, starts, d_state, d_last, summaries, d_projected, d_hidden, parts, x, in_weight,
            map_weight, grad, d_x, norm_parts, *sizes.count, 5 * width, row, in_eps, **sizes.ends, **sizes.shape,
            **product_sizes(inputs, width, normed.dtype, *BACKWARD),
        )  # fmt: skip
        sum_all(sums)
    return d_x, d_projected.flatten(0, 1).T @ normed.flatten(0, 1), d_hidden, small


def _contiguous(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if x is None else x.contiguous() for x in tensors]


def _save(ctx, inputs, kept) -> None:
    *ctx.eps, ctx.dtype, ctx.length, ctx.bends = inputs[_TENSORS:]
    ctx.save_for_backward(*inputs[:_TENSORS], *kept)
    ctx.set_materialize_grads(False)


def _gradients(ctx, by_kernels, grad, d_last) -> tuple[Tensor | None, ...]:
    """Of all inputs: first derivatives by the kernels, further ones by the plain form."""
    saved = ctx.saved_tensors
    x, in_weight, _, map_weight, map_bias, weight, bias, hidden, keep, start = saved[:_TENSORS]
    form = ctx.length, ctx.bends
    if torch.is_grad_enabled():

        def by_torch(x, in_weight, in_bias, map_weight, map_bias, weight, bias, hidden):
            norm = lambda y, w, b, eps: F.layer_norm(y.float(), w.shape, w.float(), b.float(), eps)  # noqa: E731
            normed = x if in_weight is None else norm(x, in_weight, in_bias, ctx.eps[0])
            normed, *maps = (None if y is None else y.to(ctx.dtype) for y in (normed, map_weight, map_bias))
            h, last = plain_condition(
                F.linear(normed, *maps), Tokens(keep, start, None, None), hidden,
                lambda y: norm(y, weight, bias, ctx.eps[1]), ConvForm(*form), "plain",
            )  # fmt: skip
            return torch.cat([x, h.to(x.dtype)], -1), last

        return *again_differentiable(by_torch, saved[: _TENSORS - 2], (grad, d_last)), *[None] * 7
    if grad is None:
        grad = x.new_zeros(*x.shape[:2], x.shape[2] + len(weight))
    d_x, d_map, d_hidden, small = by_kernels(
        grad, d_last, x, in_weight, map_weight, weight, bias, keep, start, *saved[_TENSORS:], *ctx.eps, *form
    )
    width, inputs = len(weight), (small.shape[0] - 5 * len(weight)) // 2
    d_weight, d_bias, d_map_bias, d_in_weight, d_in_bias = small.split_with_sizes(
        [width, width, 3 * width, inputs, inputs]
    )
    if in_weight is None:
        d_in_weight = d_in_bias = None
    d_map_bias = None if map_bias is None else d_map_bias
    d_hidden = None if hidden is None else d_hidden
    return d_x, d_in_weight, d_in_bias, d_map, d_map_bias, d_weight, d_bias, d_hidden, *[None] * 7


class _Condition(torch.autograd.Function):
    """[x, h] and the last state, in eager calls; a compiled graph has the operators below."""

    @staticmethod
    def forward(ctx, *inputs):
        features, last, *kept = _forward(*inputs)
        _save(ctx, inputs, kept)
        return features, last

    @staticmethod
    def backward(ctx, grad, d_last):
        return _gradients(ctx, _backward, grad, d_last)


# --- for torch.compile: the same as two operators, which it does not look into ---------------------------------------

_INPUTS = (
    "Tensor x, Tensor? in_weight, Tensor? in_bias, Tensor map_weight, Tensor? map_bias, Tensor weight, Tensor bias"
)

_operator = operator(
    f"conditioner({_INPUTS}, Tensor? hidden, Tensor? keep, Tensor? start, float in_eps, float eps, ScalarType dtype, "
    "float length, bool bends) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    graphed=True,
)(_forward)


@_operator.register_fake
def _(x, in_weight, in_bias, map_weight, map_bias, weight, bias, hidden, keep, start, in_eps, eps, dtype, *form):
    features, last, normed, starts = _outputs(x, len(weight), dtype)
    return features, last, normed, normed.new_empty(*x.shape[:2], 3 * len(weight)), starts


_operator_backward = operator(
    "conditioner_backward(Tensor grad, Tensor? d_last, Tensor x, Tensor? in_weight, Tensor map_weight, Tensor weight, "
    "Tensor bias, Tensor? keep, Tensor? start, Tensor normed, Tensor projected, Tensor starts, float in_eps, "
    "float eps, float length, bool bends) -> (Tensor, Tensor, Tensor, Tensor)",
    graphed=True,
)(_backward)


@_operator_backward.register_fake
def _(grad, d_last, x, in_weight, map_weight, weight, bias, keep, start, normed, projected, starts, *options):
    new = lambda *shape: starts.new_empty(shape)  # noqa: E731
    small = weight.new_empty(5 * len(weight) + (0 if in_weight is None else 2 * x.shape[2]))
    return x.new_empty(x.shape), projected.new_empty(map_weight.shape), new(x.shape[0], len(weight)), small


_operator.register_autograd(
    lambda ctx, grad, d_last, *_: _gradients(ctx, _operator_backward, grad, d_last),
    setup_context=lambda ctx, inputs, output: _save(ctx, inputs, output[2:]),
)
