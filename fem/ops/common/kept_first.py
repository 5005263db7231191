"""Padded rows in another order, kept tokens first: causality alone then hides the masked ones, which stand behind."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fem.ops.common.shared import shared
from fem.ops.common.tokens import Tokens, whole_rows


class Order(NamedTuple):
    """Where each token of the new order stood, where each one of the old order stands now, which are masked in the old
    order and in the new one, and which are kept in the new one."""

    order: Int[Tensor, "b t"]
    back: Int[Tensor, "b t"]
    masked_before: Bool[Tensor, "b t"]
    masked: Bool[Tensor, "b t"]
    kept: Bool[Tensor, "b t"]

    @property
    def column(self) -> Int[Tensor, "b t"]:
        """Where each token of the new order stood, of which masked ones count as the last."""
        return self.order.masked_fill(self.masked, self.order.shape[1] - 1)

    def kept_before(self, column: Int[Tensor, "b t"]) -> Int[Tensor, "b t"]:
        """How many kept tokens of its row stood before each column."""
        return F.pad((~self.masked_before).cumsum(1), (1, 0)).gather(1, column)

    def kept_first(self, x: Float[Tensor, "b t *d"]) -> Float[Tensor, "b t *d"]:
        """In the new order, with 0 for masked tokens."""
        return _Reordered.apply(x, self.order, self.back, self.masked, self.masked_before)

    def as_before(self, y: Float[Tensor, "b t *d"]) -> Float[Tensor, "b t *d"]:
        """In the old order, with 0 for masked tokens."""
        return _Reordered.apply(y, self.back, self.order, self.masked_before, self.masked)


@shared
def kept_first(keep: Bool[Tensor, "b t"], document: Int[Tensor, "b t"] | None) -> tuple[Tokens, Order]:
    """The tokens of a call without a mask, and their order. Masked tokens go on with the last document of their row."""
    count, place = keep.cumsum(1), torch.arange(keep.shape[1], device=keep.device).expand(keep.shape)
    back = torch.where(keep, count - 1, count[:, -1:] + place - count)
    order = torch.empty_like(back).scatter_(1, back, place)
    document = None if document is None else document.gather(1, order).cummax(1).values
    kept = place < count[:, -1:]
    return whole_rows(tuple(keep.shape), keep.device, None, document), Order(order, back, ~keep, ~kept, kept)


class _Reordered(torch.autograd.Function):
    """y_t = x_{order_t}, 0 where a token is masked; its gradient is the way back, without a sum.

    Both choose behind the order: inductor's loops over a reduction lose what is chosen before it (PyTorch 2.13). Graphs
    choose into a new tensor: a function that returns what it has written in place has no gradient there (PyTorch 2.11).
    """

    @staticmethod
    def forward(ctx, x, order, back, masked, masked_before):
        ctx.save_for_backward(back, order, masked_before, masked)
        columns = [1] * (x.ndim - 2)
        y = x.gather(1, order.view(*order.shape, *columns).expand_as(x))
        chosen = y.masked_fill if torch.compiler.is_compiling() else y.masked_fill_
        return chosen(masked.view(*masked.shape, *columns), 0)

    @staticmethod
    def backward(ctx, grad):
        return _Reordered.apply(grad, *ctx.saved_tensors), *[None] * 4
