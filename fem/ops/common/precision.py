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
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


SMALLEST_BETA, LARGEST_EXPONENT, LARGEST_LOG_WEIGHT = 0.1, 64.0, 16.0


def double(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if x is None else x.double() for x in tensors]


def needs_float64(v: Tensor, beta: Tensor | None, *log_weights: Tensor) -> bool:
    """Whether float32 would lose digits of the free energy, or of its gradients, that its result could show.

    F divides a logarithm by beta, and a gradient of F differences of beta F: a small beta magnifies the rounding of the
    one, a large beta v that of the other, and beta v is added to a log-weight, as coarse as that is large. Reads a
    value back from the device.
    """
    if beta is None or v.dtype != torch.float32 or v.device.type == "mps" or v.numel() == 0:
        return False
    low, high = v.aminmax()
    largest = torch.maximum(-low, high) * beta.amax()
    wide = (beta.amin() < SMALLEST_BETA) | (largest > LARGEST_EXPONENT)
    for x in log_weights:
        wide = wide | (torch.where(x.abs() < torch.inf, x, 0).abs().amax() > LARGEST_LOG_WEIGHT)
    return bool(wide)
