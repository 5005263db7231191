"""The sum of what programs have each written of a gradient, by one launch and in one order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

ROWS, COLUMNS = 64, 16  # 8 numbers for each of 128 threads: narrow, so that a card is full of programs


@triton.jit
def sum_parts_kernel(parts, total, count, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """total_j = sum_i parts_ij of COLUMNS columns, in float32."""
    row, column = tl.arange(0, ROWS)[:, None].to(tl.int64), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, count, ROWS):
        there = (first + row < count) & (column < columns)[None]
        sums += tl.load(parts + (first + row) * columns + column[None], there, other=0.0)
    tl.store(total + column, tl.sum(sums, 0), column < columns)


def summed(parts: Float[Tensor, "n ..."], dtype: torch.dtype) -> Float[Tensor, "..."]:
    """The sum of float32 parts, on the current device: PyTorch takes three launches, a fill and a cast among them."""
    total = parts.new_empty(parts.shape[1:], dtype=dtype)
    sum_parts_kernel[triton.cdiv(total.numel(), COLUMNS),](
        parts, total, len(parts), total.numel(), ROWS=ROWS, COLUMNS=COLUMNS
    )
    return total
