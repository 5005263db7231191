"""In which precision sums, shifts and logarithms run, float32 at least; and how often a read was computed again."""

from __future__ import annotations

import math
import warnings
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from fem.ops.common.backend import by_kernels, exporting


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """float64 if any of the tensors is, else float32."""
    double = any(tensor is not None and tensor.dtype == torch.float64 for tensor in tensors)
    return torch.float64 if double else torch.float32


def upcast(x: Tensor) -> Tensor:
    """x itself in float64, else in float32."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def softplus(x: Tensor, start: float = 0.0) -> Tensor:
    """softplus(x + start) in float32 at least: in one launch on a GPU where no gradient is wanted."""
    if by_kernels(x):
        from fem.ops.common import token_kernels  # by Triton, which the library does not require

        return token_kernels.launch_softplus(x, start)
    return F.softplus(upcast(x) + start if start else upcast(x))


def normed_softplus(a: Tensor, eps: float) -> Tensor:
    """RMSNorm(softplus(a)) along the last axis: the outer gate of a head."""
    s = F.softplus(a)
    return s * torch.rsqrt(s.square().mean(-1, keepdim=True) + eps)


def product_dtype(x: Tensor) -> torch.dtype:
    """In which a layer's maps multiply x. Autocast leaves float64 as it is, and does not know the meta device."""
    kind = x.device.type
    cast = x.dtype != torch.float64 and kind != "meta" and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if cast else x.dtype


# The certificate. Terms are at most 1, and underflow takes at most e^-87 from each (e^-700 in float64): a sum that is
# still this large has lost less than its own rounding.
LEAST_PROVEN = {torch.float32: math.exp(-60.0), torch.float64: math.exp(-600.0)}


class FallbackCount:
    """How many entries of the free energy all reads have computed, and how many of these were computed again.

    An entry is computed again where underflow cannot be ruled out (docs/equations.md). Warns once at more than 1 %.
    """

    def __init__(self):
        self.warned = False
        self.reset()

    def reset(self) -> None:
        self.entries = self.recomputed = 0

    def count(self, entries: int, recomputed: int) -> None:
        self.entries += entries
        self.recomputed += recomputed
        if not self.warned and self.recomputed > 0.01 * self.entries:
            self.warned = True
            warnings.warn(
                f"{self.recomputed} of {self.entries} free energies spanned more than 60 nats and were computed "
                "again, exactly but up to 10 times slower; smaller values or a smaller beta avoid it.",
                stacklevel=3,
            )


fallbacks = FallbackCount()

# Beyond one of these float32 is not enough: beta, beta (max v - min v), beta |v| and a log-weight's size.
# Below a span of 2 the gradient of an SSM's A erred by 6.5 times what the fuzz allows (80 calls), above it by 1.7.
SMALLEST_BETA, SMALLEST_SPAN, LARGEST_EXPONENT, LARGEST_LOG_WEIGHT = 0.1, 2.0, 64.0, 16.0


def without_autocast(device: torch.device) -> AbstractContextManager:
    """A context in which products keep their inputs' dtype.

    None in an exported graph, which would hold it as a graph of its own, and on the meta device, which has no autocast.
    """
    if device.type == "meta" or exporting() or not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def double(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if x is None else x.double() for x in tensors]


def needs_float64(v: Tensor, beta: Tensor) -> bool:
    """Whether intermediate results in float32 would cost the free energy or its gradients digits that float32 has.

    F is a logarithm divided by beta, so a small beta magnifies its rounding. Gradients are differences of terms beta F,
    so values that hardly differ, or a large beta v, magnify theirs. Reads a value back from the device.
    """
    if v.numel() == 0:
        return False
    low, high = v.aminmax()
    least, most = beta.aminmax()
    spread = (least >= SMALLEST_BETA) & ((high - low) * least >= SMALLEST_SPAN)
    return not bool(spread & (torch.maximum(-low, high) * most <= LARGEST_EXPONENT))  # NaN in one row: also for others
