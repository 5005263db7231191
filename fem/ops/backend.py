"""Which implementation of a read runs, and why."""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch

from fem.config import BACKENDS


def softmax_backend(backend: str, device: torch.device) -> str:
    """The backend that runs a softmax read on `device`: "plain", "sdpa", "triton" or "reference".

    "auto" takes the flash attention of torch where the read is built on it (CPU), else the materialised form.
    "triton" takes our kernels, on CUDA; on CPU in Triton's interpreter, which is slow and for tests.
    Raises ValueError on an unknown name, or one that cannot run on the device.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}.")
    if backend == "triton" and device.type != "cuda" and not (device.type == "cpu" and triton_interprets()):
        raise ValueError(f"backend='triton' runs on CUDA tensors, got tensors on {device}; use backend='auto'.")
    if backend == "triton" and find_spec("triton") is None:
        raise ValueError("backend='triton' needs the package triton, which is not installed: pip install triton.")
    if backend == "sdpa" and device.type != "cpu":
        raise ValueError(f"backend='sdpa' runs on CPU tensors, got tensors on {device}; use backend='auto'.")
    if backend == "auto":
        return "sdpa" if device.type == "cpu" else "plain"
    return backend


def triton_interprets() -> bool:
    """Whether Triton runs kernels in Python, on any device."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def scan_backend(backend: str) -> str:
    """The backend that runs a scan: "plain" or "reference".

    Raises ValueError on an unknown name, or one that scans do not have.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}.")
    if backend in ("sdpa", "triton"):
        raise ValueError(f"backend={backend!r} has no kernel for scans in this version; use backend='auto'.")
    return "plain" if backend == "auto" else backend
