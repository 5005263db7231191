"""Whether a call needs more than first derivatives: `torch.func`, forward-mode or second derivatives.

Our operators have a hand-written first derivative only. Where more is asked, a read takes a form of plain
differentiable steps instead, which PyTorch can transform in any way, at more time and memory.

Private parts of PyTorch: `_C._functorch.maybe_current_level` and `autograd.forward_ad._current_level`, of 2.11 to 2.13.
They may go when PyTorch says in public whether a transform runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad


def transformed(*tensors: Tensor | None) -> bool:
    """Whether a transform of `torch.func` (grad, vmap, jvp, ...) is active, or a tensor carries a tangent.

    Without tensors: whether any could carry one.
    """
    if torch.compiler.is_compiling():
        return False
    if torch._C._functorch.maybe_current_level() is not None:
        return True
    if forward_ad._current_level < 0:
        return False
    return not tensors or any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors)


def may_look(x: Tensor) -> bool:
    """Whether values of x may be read on the host: on a CPU, where nothing waits, outside graphs and transforms."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling() and not transformed(x)


def differentiated(*tensors: Tensor | None) -> bool:
    """Whether what is computed from the tensors has a gradient."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def again_differentiable(
    function: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor | None], grads: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Gradients of a differentiable function's inputs that can themselves be differentiated again.

    The function is differentiated with respect to views: inputs may be computed from each other, and the gradient of
    one must not contain that of another, which the caller's graph adds itself.
    """
    inputs = [None if x is None else x.view_as(x) for x in inputs]
    asked = [x for x in inputs if x is not None and x.requires_grad]
    pairs = [(y, grad) for y, grad in zip(function(*inputs), grads) if grad is not None and y.requires_grad]
    if not pairs:
        return [None] * len(inputs)
    outputs, grads = zip(*pairs)
    gradients = iter(torch.autograd.grad(outputs, asked, grads, create_graph=True, allow_unused=True))
    return [next(gradients) if x is not None and x.requires_grad else None for x in inputs]
