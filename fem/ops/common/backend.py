"""Which implementation of a read runs, and why."""

from __future__ import annotations

import os
import warnings
from importlib.util import find_spec

import torch

from fem.prior_table import BACKENDS

_PACKAGES = {"fla": "fla-core", "triton": "triton"}  # by module
_INSTALL = {"fla": "pip install fla-core einops", "triton": "pip install triton"}
_FOUND = {module: find_spec(module) is not None for module in (*_INSTALL, "mamba_ssm")}
_MISSED: set[str] = set()  # which the user was told of


def softmax_backend(backend: str, device: torch.device, dtype: torch.dtype) -> str:
    """The backend that runs a softmax read on `device`: "plain", "sdpa" or "reference".

    "auto" takes torch's attention over [v | e], "sdpa", on a CPU, and on CUDA in all but float64, for which it has no
    fused kernel there; elsewhere the materialised form, "plain". Nothing is measured: equal calls run equal code.
    Raises ValueError on an unknown name, or one that cannot run on the device.
    """
    if backend == "triton":
        raise ValueError(
            "backend='triton' has kernels for scans, not for softmax attention, which torch's own fused kernels read: "
            "use backend='auto'."
        )
    _check(backend)
    if backend == "sdpa" and device.type not in ("cpu", "cuda"):
        raise ValueError(f"backend='sdpa' runs on CPU and CUDA tensors, got tensors on {device}; use backend='auto'.")
    if backend == "sdpa" and device.type == "cuda" and dtype == torch.float64:
        raise ValueError("backend='sdpa' has no fused kernel for float64 on CUDA; use backend='auto'.")
    if backend == "auto":
        return "sdpa" if device.type == "cpu" or (device.type == "cuda" and dtype != torch.float64) else "plain"
    return backend


def scan_backend(backend: str, device: torch.device, dtype: torch.dtype, module: str = "fla") -> str:
    """The backend of a scan on `device`: "plain", "triton" (the kernels of a package or our own) or "reference".

    module: "fla", flash-linear-attention, or "triton", by which a scan has a kernel of our own. "auto" takes kernels on
    CUDA in all but float64, where that is installed, and the plain form elsewhere.
    Raises ValueError on an unknown name, or one that scans do not have or that cannot run here.
    """
    _check(backend)
    if backend == "sdpa":
        raise ValueError("backend='sdpa' is attention, a scan has no such form; use backend='auto'.")
    has_kernels = dtype != torch.float64 and (device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1")
    if backend == "triton" and not has_kernels:
        raise ValueError(f"backend='triton' needs CUDA and at most 32 bits, got {dtype} on {device}; use 'auto'.")
    if backend == "triton" and not _installed(module):
        needed = f"the kernels of {_PACKAGES[module]}, which is not installed: {_INSTALL[module]}"
        raise ValueError(f"backend='triton' needs {needed}.")
    if backend == "auto":
        return "triton" if device.type == "cuda" and has_kernels and _installed(module, warned=True) else "plain"
    return backend


def found(module: str) -> bool:
    """Whether "fla", "triton" or "mamba_ssm" is installed."""
    return _FOUND[module]


def _installed(module: str, warned: bool = False) -> bool:
    if warned and not found(module) and module not in _MISSED:
        _MISSED.add(module)
        warnings.warn(f"scans run without fused kernels on this GPU, much slower: {_INSTALL[module]}.", stacklevel=4)
    return found(module)


def _check(backend: str) -> None:
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}.")
