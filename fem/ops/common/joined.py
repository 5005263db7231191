"""Linear maps of one input as a single product: their weights one below the other, and the gradients of each.

In eager calls one launch joins them, and casts what else a layer multiplies by; one launch takes the gradients apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from fem.ops.common.backend import on
from fem.ops.common.launch import cdiv, launched, next_power_of_2

Weights = Sequence[Float[Tensor, "_ _"]]
Biases = Sequence[Float[Tensor, " _"] | None]


@triton.jit
def copy_kernel(x, y, there, kept, BACK: tl.constexpr):
    """y = x where there, 0 elsewhere; BACK: x = y."""
    if BACK:
        tl.store(x, tl.load(y, there), there)
    else:
        tl.store(y, tl.load(x, there, other=0.0), kept)


@launched
def join_maps_kernel(
    weights, biases, others, ends, widths, sizes, weight, bias, cast, inputs, BACK: tl.constexpr, COLUMNS: tl.constexpr
):
    """A row of weights, with 0 for the inputs that its map does not read, and its bias, 0 where its map has none; the
    maps end at these rows. Programs behind the rows cast COLUMNS numbers of one of the others. BACK: what these were
    made of is written instead; None: it is not.
    """
    row, first = tl.program_id(0).to(tl.int64), 0
    column = tl.arange(0, COLUMNS)
    for n in tl.static_range(len(widths)):
        if (row >= first) & (row < ends[n]):
            if weights[n] is not None:
                own, whole = weights[n] + (row - first) * widths[n] + column, weight + row * inputs + column
                copy_kernel(own, whole, column < widths[n], column < inputs, BACK)
            if bias is not None:
                if biases[n] is not None:
                    copy_kernel(biases[n] + (row - first) + column, bias + row + column, column < 1, column < 1, BACK)
                elif not BACK:
                    tl.store(bias + row, 0.0)
        first = ends[n]
    block = row - first
    for n in tl.static_range(len(sizes)):
        if others[n] is not None:
            at = block * COLUMNS + column
            if (block >= 0) & (block * COLUMNS < sizes[n]):
                copy_kernel(others[n] + at, cast[n] + at, at < sizes[n], at < sizes[n], BACK)
        block -= tl.cdiv(sizes[n], COLUMNS)


def joined(
    x: Float[Tensor, "b t f"], weights: Weights, biases: Biases, others: Sequence[Tensor | None]
) -> tuple[Float[Tensor, "c f"], Float[Tensor, " c"] | None, list[Tensor | None]]:
    """W and b of all maps, and the others, in x's dtype; a weight is 0 for those features of x that its map does not
    read. b is None where no map has one."""
    inputs, rows = x.shape[-1], [len(w) for w in weights]
    biases = () if all(b is None for b in biases) else biases
    if torch.compiler.is_compiling():  # whose graph fuses these operations
        weight = torch.cat([w if w.shape[1] == inputs else F.pad(w, (0, inputs - w.shape[1])) for w in weights])
        others = [None if y is None else y.to(x.dtype).contiguous() for y in others]
        if not biases:
            return weight.to(x.dtype), None, others
        biases = [weight.new_zeros(n) if b is None else b for n, b in zip(rows, biases)]
        return weight.to(x.dtype), torch.cat(biases).to(x.dtype), others

    uncast = [n for n, y in enumerate(others) if y is not None and y.dtype != x.dtype]
    others = [y if y is None else y.contiguous() for y in others]
    layout = Layout(len(weights), len(biases), tuple(accumulate(rows)), tuple(w.shape[1] for w in weights))
    given = *weights, *biases, *(others[n] for n in uncast)
    weight, bias, *cast = _Joined.apply(x.detach(), layout, *given)
    for n, y in zip(uncast, cast):
        others[n] = y
    return weight, bias, others


class Layout(NamedTuple):
    """How many weights and biases there are, at which rows the maps end, and how many inputs each reads."""

    weights: int
    biases: int
    ends: tuple[int, ...]
    widths: tuple[int, ...]


class _Joined(torch.autograd.Function):
    """W, b and the others, from weights, biases and what the others are cast from."""

    @staticmethod
    def forward(ctx, x, layout, *given):
        rows, inputs = layout.ends[-1], x.shape[-1]
        weight, bias = x.new_empty(rows, inputs), x.new_empty(rows) if layout.biases else None
        cast = [x.new_empty(y.shape) for y in given[layout.weights + layout.biases :]]
        _copy(layout, [y if y is None else y.contiguous() for y in given], weight, bias, cast, back=False)
        ctx.layout, ctx.like = layout, [None if y is None else (y.shape, y.dtype) for y in given]
        ctx.views = (
            not cast and set(layout.widths) == {inputs} and {y.dtype for y in given if y is not None} == {x.dtype}
        )
        return weight, bias, *cast

    @staticmethod
    def backward(ctx, d_weight, d_bias, *d_cast):
        wanted = [like if needed else None for like, needed in zip(ctx.like, ctx.needs_input_grad[2:])]
        if ctx.views or torch.is_grad_enabled():  # differentiable themselves
            rows = [shape[0] for shape, _ in ctx.like[: ctx.layout.weights]]
            parts = *d_weight.split(rows), *(() if d_bias is None else d_bias.split(rows)), *d_cast
            found = [like and d[..., : like[0][-1]].to(like[1]) for like, d in zip(wanted, parts)]
        else:
            found = [like and d_weight.new_empty(like[0], dtype=like[1]) for like in wanted]
            _copy(ctx.layout, found, d_weight.contiguous(), d_bias, [d.contiguous() for d in d_cast], back=True)
        return None, None, *found


def tokens_apart(*given: Float[Tensor, "b t *d"] | None) -> int | None:
    """Numbers from one token to the next, the same for all, as of columns of a product; None: they lie otherwise."""
    found = set()
    for x in given:
        if x is not None:
            whole = x.dim() > 2 and (x.numel() == 0 or x[0, 0].is_contiguous())
            evenly = len(x) == 1 or x.stride(0) == x.shape[1] * x.stride(1)
            found.add(x.stride(1) if whole and evenly else None)
    return found.pop() if len(found) == 1 else None


def by_tokens(x: Float[Tensor, "b t *d"]) -> tuple[Float[Tensor, "b t *d"], int]:
    """x and the numbers from one token to the next; a copy of x where they lie unevenly."""
    apart = tokens_apart(x)
    return (x.contiguous(), x.shape[2:].numel()) if apart is None else (x, apart)


def _copy(layout: Layout, given: Sequence[Tensor | None], weight, bias, cast: Sequence[Tensor], back: bool) -> None:
    """Launch `join_maps_kernel` on the weights, biases and others that are given."""
    count = layout.weights
    weights, biases, others = given[:count], given[count : count + layout.biases], given[count + layout.biases :]
    sizes, columns = tuple(y.numel() for y in cast), next_power_of_2(weight.shape[1])
    with on(weight.device):
        join_maps_kernel[len(weight) + sum(cdiv(size, columns) for size in sizes),](
            tuple(weights), tuple(biases) or (None,) * count, tuple(others), *layout[2:], sizes, weight, bias,
            tuple(cast), weight.shape[1], BACK=back, COLUMNS=columns,
        )  # fmt: skip
