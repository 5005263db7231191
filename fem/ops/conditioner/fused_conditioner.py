"""The conditioner by its kernels, and when they are taken."""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fem.ops.common.backend import found, multiplies_bfloat16, plain_map, plain_tensors, watched
from fem.ops.common.operator import again_differentiable
from fem.ops.common.own_backward import OwnBackward
from fem.ops.common.precision import product_dtype
from fem.ops.common.tokens import Tokens
from fem.ops.conditioner.plain_conditioner import ConvForm, plain_condition

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
    tensors = x, *weights, hidden, tokens.keep, tokens.start
    features, last = _CONDITION(tensors, first[2], norm.eps, dtype, *form)
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


def _contiguous(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if x is None else x.contiguous() for x in tensors]


class _Condition(OwnBackward):
    """The results: [x, h], the last state; and what the backward needs, x^, [f, u, a] and the state at the start of
    every tile."""

    name, fixed, count, kept = "conditioner", ("keep", "start"), 2, 2
    tensors = (
        "Tensor x, Tensor? in_weight, Tensor? in_bias, Tensor map_weight, Tensor? map_bias, Tensor weight, "
        "Tensor bias, Tensor? hidden, Tensor? keep, Tensor? start"
    )
    settings = "float in_eps, float eps, ScalarType dtype, float length, bool bends"

    def forward(self, differentiated, tensors, in_eps, eps, dtype, length, bends):
        from fem.ops.conditioner import conditioner_kernels as kernels

        x, in_weight, in_bias, map_weight, map_bias, weight, bias, hidden, keep, start = tensors
        x, map_weight, map_bias, hidden, keep, start = _contiguous(x, map_weight, map_bias, hidden, keep, start)
        inputs, sizes = x.shape[2], ChunkSizes(*x.shape[:2], len(weight))
        features, last, normed, projected, starts = self.empty_results((x, *tensors[1:]), in_eps, eps, dtype)
        summaries = last.new_empty(sizes.batch, sizes.chunks, 2, sizes.width)
        row, form = features.shape[2], {"length": length, "bends": bends}
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
        return [features, last, normed, projected, starts]

    def empty_results(self, tensors, in_eps, eps, dtype, *form):
        x, width = tensors[0], len(tensors[5])
        batch, time, inputs = x.shape
        state = lambda *shape: x.new_empty(shape, dtype=torch.float32)  # noqa: E731
        made = lambda width: x.new_empty(batch, time, width, dtype=dtype)  # noqa: E731
        starts = state(batch, -(-time // tile_rows(width)), width)
        return [x.new_empty(batch, time, inputs + width), state(batch, width), made(inputs), made(3 * width), starts]

    def backward(self, grads, tensors, kept, in_eps, eps, dtype, length, bends):
        from fem.ops.common.part_kernels import sum_all
        from fem.ops.conditioner import conditioner_kernels as kernels

        x, in_weight, in_bias, map_weight, map_bias, weight, bias, hidden, keep, start = tensors
        (normed, projected, starts), inputs, sizes = kept, x.shape[2], ChunkSizes(*x.shape[:2], len(weight))
        grad = x.new_zeros(*x.shape[:2], inputs + len(weight)) if grads[0] is None else grads[0]
        grad, x, map_weight, keep, start, d_last = _contiguous(grad, x, map_weight, keep, start, grads[1])
        programs, row, width = sizes.grid[0], grad.shape[2], sizes.width
        d_projected, d_x = torch.empty_like(projected), torch.empty_like(x)
        d_state, d_hidden = starts.new_empty(*x.shape[:2], width), starts.new_empty(sizes.batch, width)
        summaries, parts = starts.new_empty(programs, 2, width), starts.new_empty(programs, 5 * width)
        norm_parts = None if in_weight is None else starts.new_empty(programs * sizes.tiles, 2 * inputs)
        kernels.condition_backward_kernel[sizes.grid](
            grad[..., inputs:], projected, weight, bias, keep, start, starts, d_state, d_projected, summaries, parts,
            *sizes.count, row, 5 * width, eps, length=length, bends=bends, **sizes.shape,
        )  # fmt: skip
        kernels.state_backward_kernel[sizes.grid](
            projected, keep, start, starts, d_state, d_last, summaries, d_projected, d_hidden, parts, x, in_weight,
            map_weight, grad, d_x, norm_parts, *sizes.count, 5 * width, row, in_eps, **sizes.ends, **sizes.shape,
            **product_sizes(inputs, width, normed.dtype, *BACKWARD),
        )  # fmt: skip
        d_weight, d_bias, d_map_bias, d_in_weight, d_in_bias = small = [
            None if y is None else torch.empty_like(y) for y in (weight, bias, map_bias, in_weight, in_bias)
        ]
        every = parts.split_with_sizes([width, width, 3 * width], 1)
        every += () if norm_parts is None else norm_parts.chunk(2, 1)
        sum_all([pair for pair in zip(every, small) if pair[1] is not None])
        d_map = d_projected.flatten(0, 1).T @ normed.flatten(0, 1)
        found = d_x, d_in_weight, d_in_bias, d_map, d_map_bias, d_weight, d_bias, None if hidden is None else d_hidden
        return [d for d in found if d is not None]

    def again(self, grads, tensors, in_eps, eps, dtype, *form):
        *inputs, keep, start = tensors

        def by_torch(x, in_weight, in_bias, map_weight, map_bias, weight, bias, hidden):
            norm = lambda y, w, b, eps: F.layer_norm(y.float(), w.shape, w.float(), b.float(), eps)  # noqa: E731
            normed = x if in_weight is None else norm(x, in_weight, in_bias, in_eps)
            normed, *maps = (None if y is None else y.to(dtype) for y in (normed, map_weight, map_bias))
            h, last = plain_condition(
                F.linear(normed, *maps), Tokens(keep, start, None, None), hidden,
                lambda y: norm(y, weight, bias, eps), ConvForm(*form), "plain",
            )  # fmt: skip
            return torch.cat([x, h.to(x.dtype)], -1), last

        return again_differentiable(by_torch, inputs, grads)


_CONDITION = _Condition()
