"""Linear maps of a few rows by one Triton kernel: each weight is read where it lies, once.

The maps of one token are bound by the memory of their weights. PyTorch launches a product for each, and joining the
weights first would read and write all of them once more.
"""

from __future__ import annotations

import torch
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from fem.ops.common.backend import on
from fem.ops.common.launch import launched, next_power_of_2
from fem.ops.common.operator import operator
from fem.ops.common.triton_math import dot

COLUMNS = 16  # outputs of a program: few, so that enough programs read weights
NUMBERS = 4096  # of the inputs that a program holds at once
STAGES = tl.constexpr(4)  # blocks of inputs and weights that are on their way


@launched
def row_maps_kernel(
    inputs, weights, ups, biases, outputs, rows, row_stride, FEATURES: tl.constexpr, RANKS: tl.constexpr,
    WIDTHS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """y = W x + b, or U (W x) + b, of COLUMNS outputs of one of the maps, and of all rows.

    FEATURES: of an input that its map reads. RANKS: columns of U, 0 without one. WIDTHS: outputs of the maps.
    """
    block, row, step, first = tl.program_id(0), tl.arange(0, ROWS)[:, None].to(tl.int64), tl.arange(0, COLUMNS), 0
    x, w, up, y, bias = inputs[0], weights[0], weights[0], outputs[0], tl.zeros((COLUMNS,), tl.float32)
    column, depth, rank, width = step, FEATURES[0], RANKS[0], WIDTHS[0]
    for n in tl.static_range(len(weights)):  # which map this program has
        own = (block >= first) & (block < first + (WIDTHS[n] + COLUMNS - 1) // COLUMNS)
        x, w, y = tl.where(own, inputs[n], x), tl.where(own, weights[n], w), tl.where(own, outputs[n], y)
        column, depth = tl.where(own, (block - first) * COLUMNS + step, column), tl.where(own, FEATURES[n], depth)
        rank, width = tl.where(own, RANKS[n], rank), tl.where(own, WIDTHS[n], width)
        if ups[n] is not None:
            up = tl.where(own, ups[n], up)
        if biases[n] is not None:
            bias += tl.load(biases[n] + column, column < tl.where(own, width, 0), other=0.0).to(tl.float32)
        first += (WIDTHS[n] + COLUMNS - 1) // COLUMNS
    exists, there, total = row < rows, (column < width)[None], tl.zeros((ROWS, COLUMNS), tl.float32)
    line = tl.where(rank > 0, step, column)[None].to(tl.int64)
    for k in tl.range(0, depth, STEP, num_stages=STAGES):
        feature = k + tl.arange(0, STEP)
        part = tl.load(x + row * row_stride + feature[None], exists & (feature < depth)[None], other=0.0)
        lies = (line < tl.where(rank > 0, rank, width)) & (feature < depth)[:, None]
        total = dot(part, tl.load(w + line * depth + feature[:, None], lies, other=0.0), total)
    if rank > 0:
        weight = tl.load(up + column[None] * rank + step[:, None], there & (step < rank)[:, None], other=0.0)
        total = dot(total.to(weight.dtype), weight, tl.zeros_like(total))
    tl.store(y + row * width + column[None], total + bias[None], exists & there)


def _maps(inputs, weights, ups, biases) -> list[Tensor]:
    x, outputs = inputs[0], _outputs(inputs, weights, ups, biases)
    widths, features = tuple([y.shape[2] for y in outputs]), tuple([w.shape[1] for w in weights])
    ranks, tile = tuple([0 if up is None else up.shape[1] for up in ups]), next_power_of_2(max(x.shape[0], 16))
    with on(x.device):
        row_maps_kernel[sum([-(-width // COLUMNS) for width in widths]),](
            tuple(inputs), tuple(weights), tuple(ups), tuple(biases), tuple(outputs), x.shape[0], x.stride(0), features,
            ranks, widths, tile, COLUMNS, min(NUMBERS // tile, next_power_of_2(max(*features, 16))),
        )  # fmt: skip
    return outputs


def _outputs(inputs, weights, ups, biases) -> list[Tensor]:
    x = inputs[0]
    return [x.new_empty(x.shape[0], 1, (w if up is None else up).shape[0]) for w, up in zip(weights, ups)]


_operator = operator(
    "row_maps(Tensor[] inputs, Tensor[] weights, Tensor?[] ups, Tensor?[] biases) -> Tensor[]", graphed=True
)(_maps)
_operator.register_fake(_outputs)


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
    return (_operator if torch.compiler.is_compiling() else _maps)(inputs, weights, ups, biases)
