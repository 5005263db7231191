"""Launches of our Triton kernels: compiled code, found again by what it was compiled for.

Triton compiles a kernel for its constants and for the kinds of its arguments: the dtype of a tensor and whether it
starts at a multiple of 16 bytes; whether an integer is 1, a multiple of 16, and 32 bits wide. It searches by all of
these in every launch, which takes longer than the launch itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import triton
from torch import Tensor
from triton import JITFunction, KernelInterface

OPTIONS = {"enable_fp_fusion": True}  # a product and a sum are one instruction; from Triton 3.10 on not by default


def launched(function: Callable | None = None, **options) -> Callable | KernelInterface:
    """`triton.jit` for a kernel that the host launches. The kernel's constants are its last parameters."""
    if function is None:
        return functools.partial(launched, **options)
    kernel = triton.jit(function, **options)
    by_kinds = isinstance(kernel, JITFunction) and torch.version.hip is None  # AMD's cards have other kinds
    return Launched(kernel) if by_kinds else kernel


class Launched(KernelInterface):
    """A kernel that asks Triton once for the code of launches of one kind."""

    def __init__(self, kernel: JITFunction):
        functools.update_wrapper(self, kernel, updated=())
        self.fn, self.arg_names, self.codes = kernel, kernel.arg_names, {}
        self.inputs = sum(not parameter.is_constexpr for parameter in kernel.params)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable:
        return functools.partial(self.launch, grid)

    def launch(self, grid: tuple[int, ...], *arguments, **constants) -> None:
        kinds, further = kinds_of(arguments[: self.inputs]), arguments[self.inputs :]
        key = torch.cuda.current_device(), *kinds, *further, *constants, *constants.values()
        found = self.codes.get(key)
        if found is None:
            rest = [constants[name] for name in self.arg_names[len(arguments) :]]
            self.codes[key] = self.fn[grid](*arguments, **constants, **OPTIONS), rest
        else:
            code, rest = found
            code[(*grid, 1, 1)[:3]](*arguments, *rest)


def kinds_of(arguments: tuple) -> list:
    """What Triton compiles for of each argument."""
    return [(x.dtype, x.data_ptr() % 16) if isinstance(x, Tensor) else _kind(x) for x in arguments]


def _kind(x: float | tuple | None):
    if isinstance(x, int):
        return x == 1, x % 16 == 0, -(2**31) <= x < 2**31
    return tuple(kinds_of(x)) if isinstance(x, tuple) else type(x)


def cdiv(count: int, size: int) -> int:
    """Blocks of `size` that hold `count`. Triton's own, which kernels may call as well, takes microseconds."""
    return -(-count // size)


def next_power_of_2(count: int) -> int:
    return 1 << (count - 1).bit_length()
