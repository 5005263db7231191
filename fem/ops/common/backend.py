"""Which implementation of a read runs, and why."""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch
from torch import Tensor

from fem.config import BACKENDS
from fem.ops.common.self_check import passed


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
    _check(backend, device)
    if backend == "sdpa" and device.type not in ("cpu", "cuda"):
        raise ValueError(f"backend='sdpa' runs on CPU and CUDA tensors, got tensors on {device}; use backend='auto'.")
    if backend == "sdpa" and device.type == "cuda" and dtype == torch.float64:
        raise ValueError("backend='sdpa' has no fused kernel for float64 on CUDA; use backend='auto'.")
    if backend == "auto":
        return "sdpa" if device.type == "cpu" or (device.type == "cuda" and dtype != torch.float64) else "plain"
    return backend


def scan_backend(
    backend: str, device: torch.device, op: str, dtype: torch.dtype, *arguments: int | str | bool | None
) -> str:
    """The backend of a scan, or of a softmax read's doubtful entries, on `device`: "plain", "triton" or "reference".

    "auto" takes our kernels on CUDA where those of this kind passed their self-check on this card, and the plain form
    everywhere else. op: the read's folder in fem/ops; arguments: those of its example (`fem.ops.common.self_check`).
    Raises ValueError on an unknown name, or one that scans do not have or that cannot run on the device.
    """
    _check(backend, device)
    if backend == "sdpa":
        raise ValueError("backend='sdpa' is attention, a scan has no such form; use backend='auto'.")
    if backend != "auto":
        return backend
    if device.type != "cuda" or dtype == torch.float64 or triton_interprets():
        return "plain"
    return "triton" if passed(op, dtype, arguments, device.index, torch.compiler.is_compiling()) else "plain"


def widest(v: Tensor, *others: Tensor | None) -> torch.dtype:
    """The dtype by which a scan is chosen: that of v, or float64 where any of the others has it."""
    return torch.float64 if any(x is not None and x.dtype == torch.float64 for x in others) else v.dtype


def next_width(width: int) -> int:
    """The power of two, 16 or more, to which kernels pad a width."""
    padded = 16
    while padded < width:
        padded *= 2
    return padded


def triton_interprets() -> bool:
    """Whether Triton runs kernels in Python, on any device."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _check(backend: str, device: torch.device) -> None:
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}.")
    if backend == "triton" and device.type != "cuda" and not (device.type == "cpu" and triton_interprets()):
        raise ValueError(f"backend='triton' runs on CUDA tensors, got tensors on {device}; use backend='auto'.")
    if backend == "triton" and find_spec("triton") is None:
        raise ValueError("backend='triton' needs the package triton, which is not installed: pip install triton.")
