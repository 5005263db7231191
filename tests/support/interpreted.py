"""Triton's interpreter, which runs kernels on a CPU: imported before any kernel is, in a process of its own.

It rounds float32 towards zero where a card rounds to the nearest; here it rounds as a card does, and its functions are
as inexact as a card's. Launches are watched.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import card_arithmetic
import numpy as np
import sanitizer
import torch
from triton.runtime import interpreter

_HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_truncated = interpreter._convert_float


def _rounded(values, kind, wanted, mode):
    if kind.primitive_bitwidth != 32 or str(wanted) not in _HALVES:
        return _truncated(values, kind, wanted, mode)
    x = torch.from_numpy(np.frombuffer(values.tobytes(), dtype=np.float32).copy())
    return x.to(_HALVES[str(wanted)]).view(torch.int16).numpy().view(np.uint16).reshape(values.shape)


interpreter._convert_float = _rounded
sanitizer.watch()
card_arithmetic.imitate()
