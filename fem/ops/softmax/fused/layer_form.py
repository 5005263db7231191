"""What the kernels of a fused softmax layer are built for, and the sizes of one call."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from fem.ops.common.launch import cdiv, next_power_of_2

TILE_NUMBERS = 2048  # of a tile, 16 for each of 128 threads: what a tile does once takes half of all with 8
MODULATED = 2048  # of a tile that is multiplied by 1 + W h: fewer tokens would read W more often
SPANS = 8  # programs that share the flags of a head
KEYS = 64  # a block of keys of the kernels of doubt
PART = 256  # tokens whose extremes one program finds
LEAST = 16  # rows and columns of a tile that is multiplied: tensor cores take no fewer


class Form(NamedTuple):
    """What the kernels of a layer are built for; all numbers, as an operator takes them.

    mean, free: columns of a head of [mean | R]. shared: whether these are the same channels. rank: of slim gates, whose
    first maps are columns of the product and whose second maps are tensors; 0: full gates, columns of the product.
    context: columns of the conditioner's features, behind the layer's input. twice: whether attention reads v and e
    apart, which no kernel reads together.
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
    context: int
    flash: bool
    twice: bool
    tile: int = TILE_NUMBERS  # a graph has it, which may be stored, and outlive this version

    @property
    def width(self) -> int:
        """Columns of a head of o, and of v."""
        return self.free if self.shared else self.mean + self.free

    @property
    def packs(self) -> bool:
        """Whether attention reads other values than the product's columns."""
        return self.free > 0 or self.context > 0

    @property
    def apart(self) -> bool:
        """Whether f has a tensor of its own: the conditioner changes it, and no mean reads it."""
        return self.context > 0 and not self.shared

    @property
    def mixes(self) -> bool:
        """Whether anything is done to what attention returns."""
        return self.free > 0 or self.gated

    @property
    def pieces(self) -> list[int]:
        """Columns of the values that one call of attention reads."""
        return [self.mean, self.free] if self.twice else [self.mean + self.free]

    def parts(self, joint: Float[Tensor, "b t c"]) -> list[Tensor | None]:
        """q, k, v and the logits of lambda and g, (B, T, H, d) each, of slim gates what their first maps give,
        (B, T, 1, r): columns of the product; None: not there."""
        gate = (1, self.rank) if self.rank else (self.heads, self.width)
        shapes = [(self.heads, self.key_width), (self.kv_heads, self.key_width), (self.kv_heads, self.width)]
        shapes += [gate] * (self.shared + self.gated)
        columns = joint.split_with_sizes([heads * width for heads, width in shapes], -1)
        q, k, v, *gates = (y.view(*y.shape[:2], *shape) for y, shape in zip(columns, shapes))
        return [q, k, v, gates[0] if self.shared else None, gates[-1] if self.gated else None]


class Options(NamedTuple):
    """What a read is called with beside tensors."""

    form: Form
    scale: float
    eps: float
    beta_start: float  # beta = softplus(theta + beta_start)

    @classmethod
    def of(cls, form: Sequence[int], *numbers: float) -> Options:
        """Those of an operator's settings."""
        return cls(Form(*form), *numbers)


SETTINGS = "int[] numbers, float scale, float eps, float beta_start"


class Sizes(NamedTuple):
    """Grids and sizes of the kernels of one call."""

    tiles: int
    flags: int  # of a program that shares the flags of a head
    group_flags: int  # of a program that shares those of a group of heads
    most_parts: int  # of a sequence, whose extremes are found apart: a power of 2
    reads: tuple[int, int, int]  # grids: of the tiles of queries, of values,
    values: tuple[int, int, int]
    spans: tuple[int, int, int]  # of the programs that share flags, of the parts of sequences,
    parts: tuple[int, int, int]
    turns: tuple[int]  # of the tiles that are rotated
    mix: dict[str, int]
    pack: dict[str, int]
    extremes: dict[str, int]
    rotate: dict[str, int]
    doubt: dict[str, int]


@functools.lru_cache(1024)
def sizes_of(form: Form, batch: int, time: int) -> Sizes:
    """The grids and sizes with which the kernels of one call are launched."""
    power = next_power_of_2
    columns = power(form.width)
    rows = rows_of_tile(form)
    tiles = cdiv(time, rows)
    flags = power(cdiv(tiles, SPANS))
    group, halves = {"GROUP": form.heads // form.kv_heads}, {"MEAN": form.mean, "FREE": form.free}
    mix = {**group, **halves, "SHARED": form.shared, "RANK": form.rank, "GATED": form.gated, "ROWS": rows}
    channels, half = power(max(form.free, 1)), power(form.key_width // 2)
    doubtful = {"heads": form.heads, **group, "KEY": form.key_width, **halves, "CAUSAL": form.causal, "TILE": rows}
    doubtful |= {"KEYS": KEYS, "CHANNELS": channels, "WIDE": power(form.key_width)}
    if form.context:
        columns, rows = max(columns, LEAST), max(LEAST, MODULATED // columns)
        channels = columns
    values = {**halves, "SHARED": form.shared, "CONTEXT": form.context, "ROWS": rows}
    turned, parts, heads = max(1, form.tile // half), cdiv(time, PART), form.heads + form.kv_heads
    return Sizes(
        tiles,
        flags,
        power(tiles * form.heads // form.kv_heads),
        power(parts),
        reads=(form.heads, tiles, batch),
        values=(form.kv_heads, cdiv(time, rows), batch),
        spans=(form.heads, cdiv(tiles, flags), batch),
        parts=(form.kv_heads, parts, batch),
        turns=(heads * cdiv(batch * time, turned),),
        mix=mix | {"COLUMNS": max(columns, LEAST if form.rank else 1)},
        pack={**values, "COLUMNS": columns},
        extremes={**values, "PART": PART, "COLUMNS": channels},
        rotate={"WIDTH": form.key_width, "ROWS": turned, "HALF": half},
        doubt=doubtful,
    )


def rows_of_tile(form: Form) -> int:
    """Tokens of a tile."""
    return max(LEAST if form.rank else 1, form.tile // next_power_of_2(form.width))
