"""Values times 1 + W h, h a conditioner's features, and the way back: one Triton kernel for both."""

from __future__ import annotations

import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from fem.ops.common.triton_math import product

TILE = {"ROWS": 32, "COLUMNS": 64}


@triton.jit
def modulate_kernel(
    x, h, weight, y, v, d_eta, tokens, x_row: tl.constexpr, h_row: tl.constexpr, y_row: tl.constexpr,
    v_row: tl.constexpr, WIDTH: tl.constexpr, CONTEXT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """y = x (1 + W h) of a tile of tokens and columns; and with v, d_eta = x v."""
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    token, rows = row.to(tl.int64)[:, None], row < tokens
    inside = rows[:, None] & (column < WIDTH)[None]
    d = tl.load(x + token * x_row + column[None], inside, other=0.0).to(tl.float32)
    if v is not None:
        value = tl.load(v + token * v_row + column[None], inside, other=0.0).to(tl.float32)
        tl.store(d_eta + token * WIDTH + column[None], d * value, inside)
    eta = product(h, token, rows, h_row, weight, 0, WIDTH, CONTEXT, column)
    tl.store(y + token * y_row + column[None], d * (1.0 + eta), inside)


def modulate(
    x: Float[Tensor, "b t h d"],
    h: Float[Tensor, "b t c"],
    weight: Float[Tensor, "h_d c"],
    y: Float[Tensor, "b t h d"],
    v: Float[Tensor, "b t h d"] | None = None,
    d_eta: Float[Tensor, "b t h d"] | None = None,
) -> None:
    """Write y = x (1 + W h); of a gradient x, with the values v, also that of W h, x v, without gaps. On the current
    device; tensors may be columns of wider ones."""
    tokens, width = x.shape[0] * x.shape[1], len(weight)
    modulate_kernel[triton.cdiv(tokens, TILE["ROWS"]), triton.cdiv(width, TILE["COLUMNS"])](
        x, h, weight, y, v, d_eta, tokens, x.stride(1), h.stride(1), y.stride(1), 0 if v is None else v.stride(1),
        width, h.shape[2], **TILE,
    )  # fmt: skip
