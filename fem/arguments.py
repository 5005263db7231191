"""Checks of arguments that several reads share: one sentence with the argument's name, what was got, what is wanted.

Types and devices are always checked. Values are checked on a CPU in eager mode only, where reading them is free.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fem.ops.common.backend import may_look


class Allowed(NamedTuple):
    """The values that an argument may hold, in words and as a test; NaN is never among them."""

    wanted: str
    holds: Callable[[Tensor], Tensor]


DECAY = Allowed("zero or negative (a decay in nats)", lambda x: x <= 0)
FINITE_DECAY = Allowed("finite, and zero or negative (a decay in nats)", lambda x: (x <= 0) & (x > -torch.inf))
LOG_WEIGHT = Allowed("below infinity and not NaN (a weight in nats)", lambda x: x < torch.inf)
WEIGHT = Allowed("finite and non-negative", lambda x: (x >= 0) & (x < torch.inf))
BIAS = Allowed("below infinity and not NaN (-inf forbids a pair)", lambda x: x < torch.inf)
FEATURE = Allowed(
    "finite and non-negative (it holds features; take a ReLU or exp first)", lambda x: (x >= 0) & (x < torch.inf)
)


def check_flags(**flags: bool) -> None:
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, got {value!r}.")


def check_floating(beside: str, other: Tensor, **tensors: Tensor) -> None:
    """Raise unless all are floating-point tensors on the device of `other`, the argument that is called `beside`."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a floating-point tensor, got a {type(tensor).__name__}.")
        if not tensor.is_floating_point():
            raise TypeError(f"{name} must be floating point, got dtype {tensor.dtype}.")
        if tensor.layout is not torch.strided or tensor.is_nested:
            raise TypeError(f"{name} must be a dense tensor, got layout {tensor.layout}.")
        if tensor.device != other.device:
            raise ValueError(f"{name} must be on the device of {beside}, {other.device}, got {tensor.device}.")


def check_values(name: str, tensor: Tensor | None, allowed: Allowed, key_mask: Tensor | None) -> None:
    """On a CPU, in eager mode: raise unless every entry is allowed. Entries of masked tokens may be anything."""
    if tensor is None or not may_look(tensor):
        return
    wrong = ~allowed.holds(tensor)
    if not bool(wrong.any()):
        return
    if isinstance(key_mask, Tensor) and key_mask.shape == tensor.shape[:2]:
        wrong = wrong & key_mask.bool().view(*key_mask.shape, *(1,) * (tensor.dim() - 2))
    if bool(wrong.any()):
        raise ValueError(f"{name} must be {allowed.wanted} everywhere, got {tensor[wrong][0].item()}.")
