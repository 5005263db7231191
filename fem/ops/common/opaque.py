"""A function of tensors as one operator that a compiler does not look into."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fem.ops.common.operator import operator
from fem.ops.common.slabs import recorded


def opaque(name: str, inputs: str, function: Callable[..., Sequence[Tensor]], empty: Callable) -> Callable:
    """`function` of tensors as one operator that torch.compile does not look into, with its gradient.

    The operator keeps its inputs; its backward runs the function again and differentiates that. empty: the outputs
    without values.
    """
    count = inputs.count("Tensor")

    @operator(f"{name}({inputs}) -> Tensor[]")
    def forward(*tensors):
        with torch.no_grad():
            return [x.contiguous() for x in function(*tensors)]

    @operator(f"{name}_backward(Tensor[] grads, bool[] wanted, {inputs}) -> Tensor[]")
    def backward(grads, wanted, *tensors):
        with recorded():
            leaves = [x if x is None else x.detach().requires_grad_(w) for x, w in zip(tensors, wanted)]
            outputs = function(*leaves)
            asked = [x for x, w in zip(leaves, wanted) if w]
            pairs = [(y, grad) for y, grad in zip(outputs, grads) if y.requires_grad]
            outputs, grads = zip(*pairs)
            gradients = torch.autograd.grad(outputs, asked, grads, allow_unused=True)
        return [torch.zeros_like(x) if d is None else d.contiguous() for x, d in zip(asked, gradients)]

    def save(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    def differentiate(ctx, grads):
        tensors, wanted = ctx.saved_tensors, list(ctx.needs_input_grad[:count])
        gradients = iter(backward(grads, wanted, *tensors))
        return tuple(next(gradients) if w else None for w in wanted)

    forward.register_fake(empty)
    backward.register_fake(lambda grads, wanted, *tensors: [x.new_empty(x.shape) for x, w in zip(tensors, wanted) if w])
    forward.register_autograd(differentiate, setup_context=save)
    return forward
