"""In which precision sums, shifts and logarithms run: float32 at least, float64 for float64 inputs."""

from __future__ import annotations

import torch
from torch import Tensor


def wide_dtype(*tensors: Tensor | None) -> torch.dtype:
    """float64 if any of the tensors is, else float32."""
    double = any(tensor is not None and tensor.dtype == torch.float64 for tensor in tensors)
    return torch.float64 if double else torch.float32


def wide(x: Tensor) -> Tensor:
    """x itself in float64, else in float32."""
    return x.to(wide_dtype(x))
