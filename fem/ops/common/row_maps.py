"""Linear maps of a few rows by one Triton kernel: each weight is read where it lies, once.

The maps of one token are bound by the memory of their weights. PyTorch launches a product for each, and joining the
weights first would read and write all of them once more.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from fem.ops.common.backend import on
from fem.ops.common.operator import operator
from fem.ops.common.triton_math import INTERPRETED

COLUMNS = 16  # outputs of a program: few, so that enough programs read weights
NUMBERS = 4096  # of the inputs that a program holds at once
STAGES = tl.constexpr(4)  # blocks of inputs and weights that are on their way


@triton.jit
def row_maps_kernel(
    inputs, weights, ups, biases, y, rows, row_stride, FEATURES: tl.constexpr, RANKS: tl.constexpr,
    WIDTHS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """y = W x + b, or U (W x) + b, of COLUMNS outputs of one of the maps, and of all rows; the maps' outputs lie one
    behind the other.

    FEATURES: of an input that its map reads. WIDTHS: outputs of the maps. RANKS: rows of W where there is a U, else 0.
    """
    block, row, step = tl.program_id(0), tl.arange(0, ROWS)[:, None].to(tl.int64), tl.arange(0, COLUMNS)
    x, w, up, depth, width, rank = inputs[0], weights[0], weights[0], FEATURES[0], WIDTHS[0], RANKS[0]
    column, first, before, start, bias = step, 0, 0, 0, tl.zeros((COLUMNS,), tl.float32)
    for n in tl.static_range(len(weights)):  # which map this program has
        own = (block >= first) & (block < first + (WIDTHS[n] + COLUMNS - 1) // COLUMNS)
        x, w, start = tl.where(own, inputs[n], x), tl.where(own, weights[n], w), tl.where(own, before, start)
        depth, width = tl.where(own, FEATURES[n], depth), tl.where(own, WIDTHS[n], width)
        rank, column = tl.where(own, RANKS[n], rank), tl.where(own, (block - first) * COLUMNS + step, column)
        if ups[n] is not None:
            up = tl.where(own, ups[n], up)
        if biases[n] is not None:
            bias += tl.load(biases[n] + column, column < tl.where(own, width, 0), other=0.0).to(tl.float32)
        first += (WIDTHS[n] + COLUMNS - 1) // COLUMNS
        before += WIDTHS[n]
    exists, there, total = row < rows, (column < width)[None], tl.zeros((ROWS, COLUMNS), tl.float32)
    line = tl.where(rank > 0, step, column)[None].to(tl.int64)
    lines = line < tl.where(rank > 0, rank, width)
    for k in tl.range(0, depth, STEP, num_stages=STAGES):
        feature = k + tl.arange(0, STEP)
        inside = feature < depth
        part = tl.load(x + row * row_stride + feature[None], exists & inside[None], other=0.0)
        weight = tl.load(w + line * depth + feature[:, None], lines & inside[:, None], other=0.0)
        total = product(part, weight, total)
    if rank > 0:
        weight = tl.load(up + column[None] * rank + step[:, None], there & (step < rank)[:, None], other=0.0)
        total = product(total.to(weight.dtype), weight, tl.zeros_like(total))
    tl.store(y + start * rows + row * width + column[None], total + bias[None], exists & there)


@triton.jit
def product(left, right, total):
    if INTERPRETED:  # Triton's interpreter multiplies the bits of bfloat16
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, total, input_precision="ieee")


def _maps(inputs: list[Tensor], weights: list[Tensor], ups: list[Tensor | None], biases: list[Tensor | None]) -> Tensor:
    """What `row_maps` returns, all outputs one behind the other."""
    x, sizes = inputs[0], [w.shape for w in weights]
    widths, ranks = zip(*[(w[0], 0) if up is None else (up.shape[0], w[0]) for w, up in zip(sizes, ups)])
    features, rows = tuple([w[1] for w in sizes]), x.shape[0]
    y, tile = x.new_empty(rows * sum(widths)), 16 if rows <= 16 else triton.next_power_of_2(rows)
    with on(y.device):
        row_maps_kernel[sum([-(-width // COLUMNS) for width in widths]),](
            tuple(inputs), tuple(weights), tuple(ups), tuple(biases), y, rows, x.stride(0), features, ranks, widths,
            tile, COLUMNS, min(NUMBERS // tile, triton.next_power_of_2(max(*features, 16))),
        )  # fmt: skip
    return y


_operator = operator(
    "row_maps(Tensor[] inputs, Tensor[] weights, Tensor?[] ups, Tensor?[] biases) -> Tensor", waits=False
)(_maps)


@_operator.register_fake
def _(inputs, weights, ups, biases):
    return inputs[0].new_empty(len(inputs[0]) * sum(_widths(weights, ups)))


def row_maps(
    inputs: list[Float[Tensor, "b 1 _"]],
    weights: list[Float[Tensor, "_ _"]],
    ups: list[Float[Tensor, "_ _"] | None],
    biases: list[Float[Tensor, " _"] | None],
) -> list[Float[Tensor, "b 1 _"]]:
    """y_n = W_n x_n + b_n in the dtype of all, sums in float32, of few rows; U_n (W_n x_n) + b_n where a U of at most
    `COLUMNS` columns is given. A map reads the first features of its input.

    Weights are contiguous, and so are the features of a row; rows of all inputs are equally far apart.
    """
    rows, widths = inputs[0].shape[0], _widths(weights, ups)
    y = (_operator if torch.compiler.is_compiling() else _maps)(inputs, weights, ups, biases)
    parts = y.split_with_sizes([rows * width for width in widths])
    return [part.view(rows, 1, width) for part, width in zip(parts, widths)]


def _widths(weights: list[Tensor], ups: list[Tensor | None]) -> list[int]:
    return [(w if up is None else up).shape[0] for w, up in zip(weights, ups)]
