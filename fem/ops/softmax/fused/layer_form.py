"""What the kernels of a fused softmax layer are built for, and the sizes of one call."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from jaxtyping import Float
from torch import Tensor

TILE_NUMBERS = 1024  # of a tile, 8 for each of 128 threads
SPANS = 8  # programs that share the flags of a head
KEYS = 64  # a block of keys of the kernels of doubt


class Form(NamedTuple):
    """What the kernels of a layer are built for; all numbers, as an operator takes them.

    mean, free: columns of a head of [mean | R]. shared: whether these are the same channels. rank: of slim gates, whose
    first maps are columns of the product and whose second maps are tensors; 0: full gates, columns of the product.
    has_values: whether v is columns of the product, or a tensor of its own.
    """

    heads: int
    kv_heads: int
    key_width: int
    mean: int
    free: int
    shared: bool
    causal: bool
    rotary: bool
    gated: bool
    rank: int
    has_values: bool
    flash: bool

    @property
    def width(self) -> int:
        """Columns of a head of o, and of v."""
        return self.free if self.shared else self.mean + self.free

    @property
    def mixes(self) -> bool:
        """Whether anything is done to what attention returns."""
        return self.free > 0 or self.gated

    @property
    def kernel(self) -> str:
        return "flash" if self.flash else "cudnn"

    def parts(self, joint: Float[Tensor, "b t c"]) -> list[Tensor | None]:
        """q, k, v and the logits of lambda and g, (B, T, H, d) each, of slim gates what their first maps give,
        (B, T, 1, r): columns of the product; None: not there."""
        gate = (1, self.rank) if self.rank else (self.heads, self.width)
        shapes = (
            (self.heads, self.key_width),
            (self.kv_heads, self.key_width),
            (self.kv_heads, self.width),
            gate,
            gate,
        )
        there = (True, True, self.has_values, self.shared, self.gated)
        columns = iter(joint.split_with_sizes([h * w for (h, w), is_there in zip(shapes, there) if is_there], -1))
        rows = joint.shape[:2]
        return [next(columns).view(*rows, *shape) if is_there else None for shape, is_there in zip(shapes, there)]

    def logits(self, gates: Sequence[Tensor | None], ups: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The logits of lambda and g, (B, T, H, d), from the last two parts and the second maps of slim gates."""
        if not self.rank:
            return list(gates)
        maps = zip(gates, ups[::2], ups[1::2])
        shape = (self.heads, self.width)
        return [
            None if z is None else _linear(z.flatten(0, 2), up, bias).view(*z.shape[:2], *shape) for z, up, bias in maps
        ]


class Sizes(NamedTuple):
    """Grids and sizes of the kernels of one call."""

    tiles: int
    flags: int  # of a program that shares the flags of a head
    reads: tuple[int, int, int]  # grids: of the tiles of queries, of values,
    values: tuple[int, int, int]
    spans: tuple[int, int, int]  # of the programs that share flags
    mix: dict[str, int]
    pack: dict[str, int]
    doubt: dict[str, int]


@functools.lru_cache(1024)
def sizes_of(form: Form, batch: int, time: int) -> Sizes:
    """The grids and sizes with which the kernels of one call are launched."""
    power = triton.next_power_of_2
    columns = power(form.width)
    rows = rows_of_tile(form)
    tiles = triton.cdiv(time, rows)
    flags = power(triton.cdiv(tiles, SPANS))
    halves = {"MEAN": form.mean, "FREE": form.free, "SHARED": form.shared}
    tile = {"ROWS": rows, "COLUMNS": columns}
    group = {"GROUP": form.heads // form.kv_heads}
    doubtful = {"heads": form.heads, **group, "KEY": form.key_width, **halves, "CAUSAL": form.causal, "TILE": rows}
    doubtful |= {"KEYS": KEYS, "CHANNELS": power(max(form.free, 1)), "WIDE": power(form.key_width)}
    return Sizes(
        tiles,
        flags,
        reads=(form.heads, tiles, batch),
        values=(form.kv_heads, tiles, batch),
        spans=(form.heads, triton.cdiv(tiles, flags), batch),
        mix={**group, **halves, "GATED": form.gated, **tile},
        pack={**halves, **tile},
        doubt=doubtful,
    )


def rows_of_tile(form: Form) -> int:
    """Tokens of a tile."""
    return max(1, TILE_NUMBERS // triton.next_power_of_2(form.width))


def _linear(z: Float[Tensor, "n r"], weight: Float[Tensor, "w r"], bias: Float[Tensor, " w"] | None) -> Tensor:
    return z @ weight.T if bias is None else torch.addmm(bias, z, weight.T)
