"""Triton's interpreter, which runs kernels on a CPU: imported before any kernel is, in a process of its own.

It rounds float32 towards zero where a card rounds to the nearest; here it rounds as a card does, and its functions are
as inexact as a card's. Its language is patched once a launch, not in each call of a function in a kernel, and equal
types are described once, not for each result: either took a quarter of all time or more. Launches are watched.
"""

import os
from collections.abc import Callable
from types import SimpleNamespace

os.environ["TRITON_INTERPRET"] = "1"

import card_arithmetic
import numpy as np
import sanitizer
import torch
import triton.language as tl
from triton.runtime import interpreter

_HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_truncated, _patch, _range = interpreter._convert_float, interpreter._patch_lang, tl.range
_WHOLE = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})  # stands for a function that sees all of the language


def _rounded(values, kind, wanted, mode):
    if kind.primitive_bitwidth != 32 or str(wanted) not in _HALVES:
        return _truncated(values, kind, wanted, mode)
    x = torch.from_numpy(np.frombuffer(values.tobytes(), dtype=np.float32).copy())
    return x.to(_HALVES[str(wanted)]).view(torch.int16).numpy().view(np.uint16).reshape(values.shape)


def _patched_once(fn):
    return _patch(_WHOLE) if tl.range is _range else interpreter._LangPatchScope()


def _described_once(usual: Callable, name: Callable) -> Callable:
    """`__init__` that copies what it found for equal arguments, which have one name."""
    known: dict = {}

    def described(self, *arguments):
        key = name(*arguments)
        if key not in known:
            usual(self, *arguments)
            known[key] = vars(self).copy()
        vars(self).update(known[key])

    return described


def _sizes(kind, shape):
    return kind.name, *(getattr(size, "value", size) for size in shape)


def _tensor(self, handle, kind):
    _of_kind(self, None, kind)
    self.handle = handle


def _number(kind):
    if kind.name not in _numbers:
        _numbers[kind.name] = _numpy_type(kind)
    return _numbers[kind.name]


_numpy_type, _numbers = interpreter._get_np_dtype, {}
_of_kind = _described_once(tl.tensor.__init__, lambda handle, kind: kind.name)
tl.tensor.__init__, interpreter._get_np_dtype = _tensor, _number
tl.block_type.__init__ = _described_once(tl.block_type.__init__, _sizes)
interpreter._convert_float, interpreter._patch_lang = _rounded, _patched_once
sanitizer.watch()
card_arithmetic.imitate()
