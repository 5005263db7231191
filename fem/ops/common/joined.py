"""Linear maps of one input as a single product: their weights one below the other, and the gradients of each."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from fem.ops.common.backend import on

Weights = Sequence[Float[Tensor, "_ _"]]
Biases = Sequence[Float[Tensor, " _"] | None]


@triton.jit
def join_maps_kernel(weights, biases, ends, widths, weight, bias, inputs, COLUMNS: tl.constexpr):
    """A row of weights, with 0 for the inputs that its map does not read, and its bias, 0 where its map has none. The
    maps end at these rows."""
    row, first = tl.program_id(0).to(tl.int64), 0
    column = tl.arange(0, COLUMNS)
    for n in tl.static_range(len(weights)):
        if (row >= first) & (row < ends[n]):
            own = tl.load(weights[n] + (row - first) * widths[n] + column, column < widths[n], other=0.0)
            tl.store(weight + row * inputs + column, own, column < inputs)
            if bias is not None:
                if biases[n] is None:
                    tl.store(bias + row, 0.0)
                else:
                    tl.store(bias + row, tl.load(biases[n] + row - first))
        first = ends[n]


def joined(
    x: Float[Tensor, "b t f"], weights: Weights, biases: Biases | None
) -> tuple[Float[Tensor, "c f"], Float[Tensor, " c"] | None]:
    """W and b of all maps, in x's dtype; a weight is 0 for those features of x that its map does not read."""
    inputs, rows = x.shape[-1], [len(w) for w in weights]
    if torch.compiler.is_compiling():  # whose graph fuses these operations
        weight = torch.cat([w if w.shape[1] == inputs else F.pad(w, (0, inputs - w.shape[1])) for w in weights])
        if biases is None:
            return weight.to(x.dtype), None
        biases = [weight.new_zeros(n) if b is None else b for n, b in zip(rows, biases)]
        return weight.to(x.dtype), torch.cat(biases).to(x.dtype)

    return _Joined.apply(x.detach(), len(rows), *weights, *(biases or ()))


class _Joined(torch.autograd.Function):
    """W and b by one launch, whose gradients are views."""

    @staticmethod
    def forward(ctx, x, count, *maps):
        weights, biases = maps[:count], maps[count:]
        inputs, rows = x.shape[-1], [len(w) for w in weights]
        weight, bias = x.new_empty(sum(rows), inputs), x.new_empty(sum(rows)) if biases else None
        given = tuple(w.contiguous() for w in weights), biases or (None,) * count
        ends, widths = tuple(accumulate(rows)), tuple(w.shape[1] for w in weights)
        with on(x.device):
            join_maps_kernel[sum(rows),](*given, ends, widths, weight, bias, inputs, triton.next_power_of_2(inputs))
        ctx.dtype, ctx.shapes = weights[0].dtype, [w.shape for w in weights]
        ctx.biased = [b is not None for b in biases]
        return weight, bias

    @staticmethod
    def backward(ctx, d_weight, d_bias):
        rows = [shape[0] for shape in ctx.shapes]
        d_weights = d_weight.to(ctx.dtype).split_with_sizes(rows)
        d_weights = [d if d.shape == shape else d[:, : shape[1]] for d, shape in zip(d_weights, ctx.shapes)]
        d_biases = d_bias.to(ctx.dtype).split_with_sizes(rows) if ctx.biased else ()
        return None, None, *d_weights, *(d if biased else None for d, biased in zip(d_biases, ctx.biased))
