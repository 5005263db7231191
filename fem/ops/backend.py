"""Which implementation of a read runs, and why."""

from __future__ import annotations

import torch

BACKENDS = ("auto", "plain", "sdpa", "triton", "reference")


def softmax_backend(backend: str, device: torch.device) -> str:
    """The backend that runs a softmax read on `device`: "plain", "sdpa" or "reference".

    "auto" takes the flash attention of torch where the read is built on it (CPU), else the materialised form.
    Raises ValueError on an unknown name, or one that cannot run on the device.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}.")
    if backend == "triton":
        raise ValueError("backend='triton' has no kernel for the softmax read in this version; use backend='auto'.")
    if backend == "sdpa" and device.type != "cpu":
        raise ValueError(f"backend='sdpa' runs on CPU tensors, got tensors on {device}; use backend='auto'.")
    if backend == "auto":
        return "sdpa" if device.type == "cpu" else "plain"
    return backend


def scan_backend(backend: str) -> str:
    """The backend that runs a scan: "plain" or "reference".

    Raises ValueError on an unknown name, or one that scans do not have.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}.")
    if backend in ("sdpa", "triton"):
        raise ValueError(f"backend={backend!r} has no kernel for scans in this version; use backend='auto'.")
    return "plain" if backend == "auto" else backend
