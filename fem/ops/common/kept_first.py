"""Padded rows in another order, kept tokens first: causality alone then hides the masked ones, which stand behind."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fem.ops.common.shared import shared
from fem.ops.common.tokens import Tokens, whole_rows


class Order(NamedTuple):
    """Where each token of the new order stood, where each one of the old order stands now, and which are kept in the
    old order and in the new one."""

    order: Int[Tensor, "b t"]
    back: Int[Tensor, "b t"]
    keep: Bool[Tensor, "b t"]
    kept: Bool[Tensor, "b t"]

    def kept_first(self, x: Float[Tensor, "b t *d"]) -> Float[Tensor, "b t *d"]:
        return _Reordered.apply(x, self.order, self.back)

    def as_before(self, y: Float[Tensor, "b t *d"]) -> Float[Tensor, "b t *d"]:
        """In the old order, with 0 for masked tokens."""
        keep = self.keep.view(*self.keep.shape, *[1] * (y.ndim - 2))
        return torch.where(keep, _Reordered.apply(y, self.back, self.order), 0)


@shared
def kept_first(keep: Bool[Tensor, "b t"], document: Int[Tensor, "b t"] | None) -> tuple[Tokens, Order]:
    """The tokens of a call without a mask, and their order. Masked tokens go on with the last document of their row."""
    count, place = keep.cumsum(1), torch.arange(keep.shape[1], device=keep.device).expand(keep.shape)
    back = torch.where(keep, count - 1, count[:, -1:] + place - count)
    order = torch.empty_like(back).scatter_(1, back, place)
    document = None if document is None else document.gather(1, order).cummax(1).values
    return whole_rows(tuple(keep.shape), keep.device, None, document), Order(order, back, keep, place < count[:, -1:])


class _Reordered(torch.autograd.Function):
    """The tokens of each row in another order, y_t = x_{order_t}; its gradient is the way back, without a sum."""

    @staticmethod
    def forward(ctx, x, order, back):
        ctx.save_for_backward(back, order)
        return x.gather(1, order.view(*order.shape, *[1] * (x.ndim - 2)).expand_as(x))

    @staticmethod
    def backward(ctx, grad):
        return _Reordered.apply(grad, *ctx.saved_tensors), None, None
