"""On which device kernels are launched, and whether it is an AMD one."""

from __future__ import annotations

from functools import wraps

import torch
import triton
from torch import Tensor

from fem.ops.common.backend import triton_interprets


def on_its_device(run):
    """`run` with the device of its first tensor as the current one, which is the one that Triton launches on."""

    @wraps(run)
    def there(*arguments):
        given = (x for argument in arguments for x in (argument if isinstance(argument, list) else [argument]))
        with torch.cuda.device_of(next(x for x in given if isinstance(x, Tensor))):
            return run(*arguments)

    return there


def on_amd() -> bool:
    """Whether the current GPU is AMD's, whose warps have 64 threads."""
    return not triton_interprets() and triton.runtime.driver.active.get_current_target().backend == "hip"
