"""Gradients recorded inside of an operator, which runs below autograd.

Private parts of PyTorch: `_C._dispatch_tls_is_dispatch_key_excluded` and its setter, of 2.11 to 2.13. They may go when
an operator of `torch.library` may differentiate what it computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_AUTOGRAD = [torch._C.DispatchKey.AutogradCPU, torch._C.DispatchKey.AutogradCUDA]
_AUTOGRAD += [torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.ADInplaceOrView]


@contextmanager
def recorded() -> Iterator[None]:
    """Inside a custom op, where autograd is left out: record gradients all the same."""
    before = [torch._C._dispatch_tls_is_dispatch_key_excluded(key) for key in _AUTOGRAD]
    for key in _AUTOGRAD:
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
    try:
        with torch.enable_grad():
            yield
    finally:
        for key, excluded in zip(_AUTOGRAD, before):
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, excluded)
