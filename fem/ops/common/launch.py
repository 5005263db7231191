"""What our own Triton kernels ask of their device, and of a module in whose place they compute."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from fem.ops.common.backend import found
from fem.ops.common.steps import exporting
from fem.ops.common.transforms import differentiated, transformed

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def on(device: torch.device) -> AbstractContextManager:
    """A context in which Triton, which launches on the current device, launches on this one."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def by_kernels(*tensors: Tensor | None, differentiable: bool = False) -> bool:
    """Whether kernels may compute with the tensors: called eagerly on CUDA, at most 32 bits wide, and without a
    gradient, unless the kernels are differentiable."""
    if not (tensors[0].is_cuda and found("triton")) or torch.compiler.is_compiling():
        return False
    return tensors[0].numel() > 0 and plain_tensors(*tensors) and (differentiable or not differentiated(*tensors))


def plain_tensors(*tensors: Tensor | None) -> bool:
    """Whether kernels may read the tensors themselves: no subclasses, such as a part of a tensor that devices share,
    at most 32 bits wide, and neither transformed nor exported."""
    given = [x for x in tensors if x is not None]
    fit = all(type(x) in (Tensor, nn.Parameter) and x.dtype in _DTYPES for x in given)
    return fit and not (exporting() or transformed(*given))


def watched(module: nn.Module) -> bool:
    """Whether somebody's hook or other forward would not run if the module were not called."""
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(hooks) or (not torch.compiler.is_compiling() and "forward" in vars(module))


def plain_map(module: nn.Module) -> bool:
    """Whether a linear map may be computed from its weights: no adapter, hook or sharded weight is in its place."""
    usual = type(module).forward is nn.Linear.forward and type(module.weight) in (nn.Parameter, Tensor)
    return usual and not watched(module)
