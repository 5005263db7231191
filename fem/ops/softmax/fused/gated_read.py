"""The read and the gates of an attention on a GPU whose maps are somebody else's: a replaced attention's.

o = g ((1 - lambda) mean + lambda F), g and lambda from their logits                             (Eq. 4, 7, 10, 11)
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from fem.ops.common.backend import on
from fem.ops.common.joined import by_tokens
from fem.ops.common.operator import refuse_second_derivatives
from fem.ops.softmax.fused.layer_form import Options
from fem.ops.softmax.fused.parts_read import Beside, Totals, read_parts, through_parts


def gated_read(
    options: Options,
    q: Float[Tensor, "b t h dk"],
    k: Float[Tensor, "b t hkv dk"],
    v: Float[Tensor, "b t hkv d"],
    inner: Float[Tensor, "b t h d"] | None,
    outer: Float[Tensor, "b t h d"] | None,
    theta: Float[Tensor, "hkv d"] | None,
) -> Float[Tensor, "b t h d"]:
    """o of a whole sequence of 16-bit numbers, differentiable once, in an eager call.

    theta: of beta, 1 without one. Raises RuntimeError where its gradient is to be differentiated.
    """
    return _GatedRead.apply(options, q, k, v, inner, outer, theta)


class _GatedRead(torch.autograd.Function):
    @staticmethod
    def forward(ctx, options, *inputs):
        *parts, theta = inputs
        parts = [x if x is None else by_tokens(x.flatten(2))[0].view(x.shape) for x in parts]
        with on(parts[0].device):
            kept = read_parts(options, parts, parts[:2], theta, _beside(parts), False)
        ctx.save_for_backward(theta, *parts, *kept)
        ctx.options = options
        return kept[0]

    @staticmethod
    def backward(ctx, grad):
        refuse_second_derivatives()
        theta, *saved = ctx.saved_tensors
        parts, (o, *kept) = saved[:5], saved[5:]
        d_v, d_inner, d_outer, d_theta = (None if x is None else torch.empty_like(x) for x in (*parts[2:], theta))
        totals, targets = Totals(None, None, None, d_theta), (None, None, d_v, d_inner, d_outer)
        with on(grad.device):
            d_q, d_k, *_ = through_parts(ctx.options, grad, o, kept, parts, targets, totals, _beside(parts))
        return None, d_q, d_k, d_v, d_inner, d_outer, d_theta


def _beside(parts: list[Tensor]) -> Beside:
    return Beside(parts[2], None, [None] * 4, None, None, ())
