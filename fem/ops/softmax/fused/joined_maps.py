"""The maps of a layer as one map: their weights below each other, in the dtype of the product."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from fem.ops.common.backend import on

MOST = 5  # maps: of q, k, v and both gates


@triton.jit
def _copy(w, b, weight, bias, row, first, end, width, inputs, COLUMNS: tl.constexpr):
    """A row of weights, with 0 for the inputs that its map does not read, and its bias, 0 where there is none."""
    if w is not None:  # noqa: SIM102  (known when the kernel is compiled, unlike the row)
        if (row >= first) & (row < end):
            column = tl.arange(0, COLUMNS)
            own = tl.load(w + (row - first) * width + column, column < width, other=0.0)
            tl.store(weight + row * inputs + column, own, column < inputs)
            if bias is not None:
                if b is None:
                    tl.store(bias + row, 0.0)
                else:
                    tl.store(bias + row, tl.load(b + row - first))


@triton.jit
def join_maps_kernel(
    w0, w1, w2, w3, w4, b0, b1, b2, b3, b4, end0, end1, end2, end3, end4, width0, width1, width2, width3, width4,
    weight, bias, inputs, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Of up to five maps, which end at these rows."""
    row = tl.program_id(0).to(tl.int64)
    _copy(w0, b0, weight, bias, row, 0, end0, width0, inputs, COLUMNS)
    _copy(w1, b1, weight, bias, row, end0, end1, width1, inputs, COLUMNS)
    _copy(w2, b2, weight, bias, row, end1, end2, width2, inputs, COLUMNS)
    _copy(w3, b3, weight, bias, row, end2, end3, width3, inputs, COLUMNS)
    _copy(w4, b4, weight, bias, row, end3, end4, width4, inputs, COLUMNS)


def joined(
    x: Float[Tensor, "b t f"],
    weights: Sequence[Float[Tensor, "_ _"]],
    biases: Sequence[Float[Tensor, " _"] | None] | None,
) -> tuple[Float[Tensor, "c f"], Float[Tensor, " c"] | None]:
    """W and b of all maps, in x's dtype; a weight is 0 for those features of x that its map does not read."""
    inputs, rows = x.shape[-1], [len(w) for w in weights]
    if torch.compiler.is_compiling():  # whose graph fuses these operations
        weight = torch.cat([w if w.shape[1] == inputs else F.pad(w, (0, inputs - w.shape[1])) for w in weights])
        if biases is None:
            return weight.to(x.dtype), None
        biases = [weight.new_zeros(n) if b is None else b for n, b in zip(rows, biases)]
        return weight.to(x.dtype), torch.cat(biases).to(x.dtype)

    weight, bias = x.new_empty(sum(rows), inputs), None if biases is None else x.new_empty(sum(rows))
    padded = lambda of, nothing: [*of, *[nothing] * (MOST - len(weights))]  # noqa: E731
    given = padded([w.contiguous() for w in weights], None), padded(biases or [None] * len(weights), None)
    ends, widths = padded([sum(rows[: n + 1]) for n in range(len(rows))], 0), padded([w.shape[1] for w in weights], 0)
    with on(x.device):
        join_maps_kernel[sum(rows),](
            *given[0], *given[1], *ends, *widths, weight, bias, inputs, COLUMNS=triton.next_power_of_2(inputs)
        )
    return weight, bias
