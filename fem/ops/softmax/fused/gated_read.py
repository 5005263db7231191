"""The read and the gates of an attention on a GPU whose maps are somebody else's: a replaced attention's.

o = g ((1 - lambda) mean + lambda F), g and lambda from their logits                             (Eq. 4, 7, 10, 11)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from fem.ops.common.backend import on
from fem.ops.common.joined import by_tokens
from fem.ops.common.operator import operator, refuse_second_derivatives
from fem.ops.softmax.fused.layer_form import Form, Options
from fem.ops.softmax.fused.parts_read import Beside, Totals, read_parts, shapes_of, through_parts


def gated_read(
    options: Options,
    q: Float[Tensor, "b t h dk"],
    k: Float[Tensor, "b t hkv dk"],
    v: Float[Tensor, "b t hkv d"],
    inner: Float[Tensor, "b t h d"] | None,
    outer: Float[Tensor, "b t h d"] | None,
    theta: Float[Tensor, "hkv d"] | None,
    seen: Sequence[Tensor] = (),
) -> Float[Tensor, "b t h d"]:
    """o of a whole sequence of 16-bit numbers, differentiable once.

    theta: of beta, 1 without one. seen: as in `mixed_read`, in eager calls. Raises RuntimeError where its gradient is
    to be differentiated.
    """
    # Heads lie side by side in a token's row, which other tokens' rows follow at equal distances.
    parts = [x if x is None else by_tokens(x.flatten(2))[0].view(x.shape) for x in (q, k, v, inner, outer)]
    if torch.compiler.is_compiling():
        return _operator(*parts, theta, list(map(int, options.form)), *options[1:])[0]
    return _GatedRead.apply(options, seen, *parts, theta)


class _GatedRead(torch.autograd.Function):
    """o, in eager calls; a compiled graph has the operators below."""

    @staticmethod
    def forward(ctx, options, seen, *inputs):
        kept = _forward(options, *inputs, seen=seen, differentiated=any(ctx.needs_input_grad))
        ctx.save_for_backward(*inputs, *kept)
        ctx.options, ctx.seen = options, seen
        return kept[0]

    @staticmethod
    def backward(ctx, grad):
        refuse_second_derivatives()
        return None, None, *_backward(ctx.options, grad, ctx.saved_tensors, ctx.seen)


_INPUTS = 6


def _forward(
    options: Options, *inputs: Tensor | None, seen: Sequence[Tensor] = (), differentiated: bool = False
) -> list[Tensor]:
    *parts, theta = inputs
    with on(parts[0].device):
        return read_parts(options, parts, parts[:2], theta, _beside(parts, seen), differentiated)


def _backward(
    options: Options, grad: Tensor, saved: Sequence[Tensor | None], seen: Sequence[Tensor] = ()
) -> list[Tensor | None]:
    (*parts, theta), (o, *kept) = saved[:_INPUTS], saved[_INPUTS:]
    *others, d_theta = (None if x is None else torch.empty_like(x) for x in (*parts[2:], theta))
    totals = Totals(None, None, None, d_theta)
    inputs = grad, o, kept, parts, (None, None, *others), totals, _beside(parts, seen)
    with on(grad.device):
        d_q, d_k, *_ = through_parts(options, *inputs)
    return [d_q, d_k, *others, d_theta]


def _beside(parts: Sequence[Tensor], seen: Sequence[Tensor]) -> Beside:
    return Beside(parts[2], None, [None] * 4, None, None, seen)


# --- for torch.compile: the same as two operators, which it does not look into ---------------------------------------

_GATED = "Tensor q, Tensor k, Tensor v, Tensor? inner, Tensor? outer, Tensor? theta"
_OPTIONS = "int[] form, float scale, float eps, float beta_start"


@operator(f"gated_read({_GATED}, {_OPTIONS}) -> Tensor[]", graphed=True)
def _operator(*inputs):
    *tensors, form, scale, eps, start = inputs
    return _forward(Options(Form(*form), scale, eps, start), *tensors)


@_operator.register_fake
def _(q, k, v, inner, outer, theta, form, *numbers):
    return shapes_of(Form(*form), q)


@operator(f"gated_read_backward(Tensor grad, {_GATED}, Tensor[] kept, {_OPTIONS}) -> Tensor[]", graphed=True)
def _operator_backward(grad, *inputs):
    *tensors, kept, form, scale, eps, start = inputs
    found = _backward(Options(Form(*form), scale, eps, start), grad, [*tensors, *kept])
    return [d for d in found if d is not None]


@_operator_backward.register_fake
def _(grad, *inputs):
    return [x.new_empty(x.shape) for x in inputs[:_INPUTS] if x is not None]


def _save(ctx, inputs, output):
    ctx.options = inputs[_INPUTS:]
    ctx.save_for_backward(*inputs[:_INPUTS], *output)


def _differentiate(ctx, grads):
    inputs, kept = ctx.saved_tensors[:_INPUTS], ctx.saved_tensors[_INPUTS:]
    found = iter(_operator_backward(grads[0], *inputs, list(kept), *ctx.options))
    return *(None if x is None else next(found) for x in inputs), *[None] * 4


_operator.register_autograd(_differentiate, setup_context=_save)
