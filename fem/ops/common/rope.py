"""Rotary position embedding: the score of a rotated q and k depends only on their distance."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float64, Int
from torch import Tensor

from fem.ops.common.backend import by_kernels, exporting, portable
from fem.ops.common.operator import operator


def frequencies(
    width: int, theta: float, device: torch.device, given: Sequence[float] | None = None
) -> Float64[Tensor, " planes"]:
    """theta^(-2j/d), or those given: radians per position of every plane. Raises ValueError on an odd width."""
    if given is not None:
        return torch.tensor(given, dtype=torch.float64, device=device)
    if width % 2:
        raise ValueError(f"rotate pairs the channels of x, so its width must be even, got {width}.")
    return theta ** (torch.arange(0, -width, -2, dtype=torch.float64, device=device) / width)


def rotate_all(
    tensors: Sequence[Tensor],
    position: Int[Tensor, " t"] | Int[Tensor, "b t"],
    frequency: Float64[Tensor, " planes"],
    factor: float = 1.0,
) -> list[Tensor]:
    """Tensors (B, T, H, d) of one dtype, turned by position in the planes (j, j + d/2), as transformers pairs them.

        y_j       = x_j cos(a_j) - x_{j+d/2} sin(a_j)        a_j = position frequency_j,  j < d/2
        y_{j+d/2} = x_{j+d/2} cos(a_j) + x_j sin(a_j)

    Angles, cos and sin are computed in float64, multiplied by the factor and rounded once, to the tensors' dtype.
    """
    x = tensors[0]
    if len(tensors) == 2 and by_kernels(*tensors):
        from fem.ops.common.token_kernels import rotated_tokens  # by Triton, which the library does not require

        return rotated_tokens(tensors, position, frequency, factor)
    traced = torch.compiler.is_compiling() and not portable()
    table = _table if traced and x.shape[1] > 1 else _cos_and_sin  # of one token, launches cost more than angles
    cos, sin = table(position, frequency, factor, x.dtype)
    if len(tensors) > 1 and x.shape[1] == 1:  # of one token the calls cost more than the copy
        both = turned(torch.cat(tensors, 2), cos, sin)
        return list(torch.split_with_sizes(both, [x.shape[2] for x in tensors], 2))
    return [turned(x, cos, sin) for x in tensors]


def _cos_and_sin(position: Tensor, frequency: Tensor, factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    angle = position.double()[..., None, None] * frequency
    cos = (angle + math.pi / 2).sin() if exporting() else angle.cos()  # onnxruntime before 1.29 has no float64 cos
    sin = angle.sin()
    if factor != 1.0:
        cos, sin = factor * cos, factor * sin
    return cos.to(dtype), sin.to(dtype)


@operator(
    "rotary_table(Tensor position, Tensor frequency, float factor, ScalarType dtype) -> (Tensor, Tensor)", graphed=True
)
def _table(position, frequency, factor, dtype):
    """`_cos_and_sin`, which inductor would fuse into the kernels of q and of k: float64 for every head and layer. As an
    op it is made once in a graph, as equal calls are one, by three kernels: cos and sin round what they write."""
    if factor != 1.0:
        return _cos_and_sin(position, frequency, factor, dtype)
    angle = position[..., None, None] * frequency
    rounded = lambda of: of(angle, out=torch.empty(angle.shape, dtype=dtype, device=angle.device))  # noqa: E731
    return rounded(torch.cos), rounded(torch.sin)


@_table.register_fake
def _(position, frequency, factor, dtype):
    shape = (*position.shape, 1, frequency.shape[0])
    return tuple(position.new_empty(shape, dtype=dtype) for _ in "cs")


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (B, T, H, d) turned by angles whose cos and sin are (.., T, 1, d/2)."""
    low, high = x.chunk(2, -1)
    return torch.cat([torch.addcmul(low * cos, high, -sin), torch.addcmul(high * cos, low, sin)], -1)
