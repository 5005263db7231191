"""The sum of what programs have each written of a gradient, by one launch and in one order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from fem.ops.common.launch import cdiv, launched

ROWS, COLUMNS = 64, 16  # 8 numbers for each of 128 threads: narrow, so that a card is full of programs


@launched
def sum_parts_kernel(parts, totals, counts, widths, rows, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """total_j = sum_i parts_ij of COLUMNS columns of one of several tensors, in float32.

    rows: numbers from one part to the next."""
    row, block = tl.arange(0, ROWS)[:, None].to(tl.int64), tl.program_id(0)
    for n in tl.static_range(len(parts)):
        column = block * COLUMNS + tl.arange(0, COLUMNS)
        if (block >= 0) & (block * COLUMNS < widths[n]):
            sums = tl.zeros((ROWS, COLUMNS), tl.float32)
            for first in range(0, counts[n], ROWS):
                there = (first + row < counts[n]) & (column < widths[n])[None]
                sums += tl.load(parts[n] + (first + row) * rows[n] + column[None], there, other=0.0)
            tl.store(totals[n] + column, tl.sum(sums, 0), column < widths[n])
        block -= tl.cdiv(widths[n], COLUMNS)


def sum_all(pairs: Sequence[tuple[Float[Tensor, "n ..."], Float[Tensor, "..."]]]) -> None:
    """Write the sums of float32 parts into tensors, on the current device, by one launch."""
    parts, totals = zip(*pairs)
    widths = tuple(total.numel() for total in totals)
    sum_parts_kernel[sum(cdiv(width, COLUMNS) for width in widths),](
        parts, totals, tuple(map(len, parts)), widths, tuple(x.stride(0) for x in parts), ROWS=ROWS, COLUMNS=COLUMNS
    )


def summed(parts: Float[Tensor, "n ..."], dtype: torch.dtype) -> Float[Tensor, "..."]:
    """The sum of float32 parts, on the current device: PyTorch takes three launches, a fill and a cast among them."""
    total = parts.new_empty(parts.shape[1:], dtype=dtype)
    sum_all([(parts, total)])
    return total
