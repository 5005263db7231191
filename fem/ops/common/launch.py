"""What our own Triton kernels ask of their device, and of a module in whose place they compute."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn


def on(device: torch.device) -> AbstractContextManager:
    """A context in which Triton, which launches on the current device, launches on this one."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def watched(module: nn.Module) -> bool:
    """Whether somebody's hook or other forward would not run if the module were not called."""
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(hooks) or (not torch.compiler.is_compiling() and "forward" in vars(module))
