"""The linear map that every part of a layer is built from."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fem.state import as_device


class Projection(nn.Linear):
    """y = W x + W_c h + b, from features [x, h]: the input x and, behind it, the conditioner's h.        (Eq. 34a)

    W starts N(0, std), b at `start` and W_c at 0, so a new layer ignores its conditioner. A map that only reads h
    starts at 1e-12, 2^-24 in float16: DoRA divides by the norms of rows, and 1 + eta (Eq. 34b) is still 1.
    """

    def __init__(
        self, inputs: int, width: int, bias: bool = True, context: int = 0, start: float = 0.0, std: float = 0.02
    ):
        self.context, self.start, self.std = context, start, std
        super().__init__(inputs + context, width, bias=bias)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)
        if self.context:  # by a function that takes a sharded weight, too
            nn.init.constant_(self.weight[:, -self.context :], 0 if self.in_features > self.context else 1e-12)
            Projection._lift(self)  # by the class's name, as torchtitan calls this function on maps of its own
        if self.bias is not None:
            nn.init.constant_(self.bias, self.start)

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)  # moves and casts the weights
        self._lift()
        return self

    @torch.no_grad()
    def _lift(self) -> None:
        if self.in_features == self.context and self.weight.dtype == torch.float16:
            self.weight.masked_fill_(self.weight == 0, 2**-24)

    def _warn(self, _) -> None:
        warnings.warn(
            "torch.ao leaves the projections of FEM layers as they are; torchao.quantization.quantize_ takes them.",
            stacklevel=2,
        )

    qconfig = property(fset=_warn)  # which torch.ao sets on every module, but it quantises nn.Linear itself only


def mapped(maps: Sequence[nn.Module], features: Tensor | list[Tensor]) -> list[Tensor]:
    """What each map makes of the features; a list has it already (`fem.joint_maps`)."""
    return features if isinstance(features, list) else [one(features) for one in maps]


def check_tokens(name: str, x: Tensor, axes: str, width: int, projection: nn.Module) -> None:
    """Raise unless x, an argument of a layer, is a dense floating-point (B, T, width) at home with the weights."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        got = f"dtype {x.dtype}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
        raise TypeError(f"{name} must be a floating-point tensor of embedded tokens, got {got}; embed token ids first.")
    if x.is_nested or x.layout is not torch.strided:
        got = "a nested tensor" if x.is_nested else f"layout {x.layout}"
        raise TypeError(f"{name} must be a dense tensor, got {got}; pad rows to one length, and mask what was added.")

    if x.ndim != 3 or x.shape[-1] != width:
        image = x.ndim == 4 and x.shape[1] == width
        hint = f"; of one row, pass {name}[None]" if x.shape[1:] == (width,) else ""
        hint = f"; of an image, pass {name}.flatten(2).mT" if image else hint
        raise ValueError(f"{name} must have shape {axes}, got {tuple(x.shape)}{hint}.")
    if type(projection) is not Projection or "_hf_hook" in vars(projection):
        return
    weight = projection.weight  # no other library manages it
    if x.device != weight.device:
        raise ValueError(
            f"{name} must be on the layer's device, {weight.device}, got {name} on {x.device}; move one of them."
        )
    if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
        raise TypeError(
            f"{name} must have the layer's dtype, {weight.dtype}, got {x.dtype}; cast one, or use autocast."
        )


def move(module: nn.Module, device: torch.device | str | int | None, dtype: torch.dtype | None) -> None:
    """Move a new layer's parameters. Raises ValueError on what is no device, TypeError on what is no floating dtype."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"dtype must be a floating dtype of torch, such as torch.bfloat16, got {dtype!r}.")
    module.to(device=None if device is None else as_device("device", device), dtype=dtype)
