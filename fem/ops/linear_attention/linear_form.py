"""What a layer of linear attention or GLA is between its input and its output map.

[q | k | v | inner | outer | decay] = W x + b        g = logsigmoid(decay) / 16
o = outer gate of (1 - lambda) mean + lambda F of the read by phi(q), phi(k), v and g            (Eq. 4, 7, 10, 11)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from fem.ops.common.launch import cdiv, next_power_of_2

NUMBERS = 2048  # of a tile, 16 for each of 128 threads


class LinearForm(NamedTuple):
    """Widths of a layer and the parts that it has; all numbers, as an operator takes them.

    mean, free: channels of a head that read either; shared: they are the same ones, which lambda mixes. rank: of slim
    gates, whose first maps are columns of the product and whose second maps are tensors; 0: full gates.
    """

    heads: int
    key: int
    mean: int
    free: int
    shared: bool
    gated: bool
    rank: int
    decays: int  # of a head, none, one or as many as it has key channels
    context: int  # columns of the conditioner's features, behind the layer's input

    @property
    def width(self) -> int:
        """Columns of a head of o, and of v."""
        return self.free if self.shared else self.mean + self.free

    @property
    def keys(self) -> int:
        """Columns of q and k."""
        return 2 * self.heads * self.key

    @property
    def columns(self) -> list[int]:
        """Those of v, of lambda's and g's logits, or of what their first maps give, and of the decay."""
        values = self.heads * self.width
        gate = self.rank or values
        return [values, gate * self.shared, gate * self.gated, self.heads * self.decays]

    def by_heads(self, columns: Float[Tensor, "b t c"]) -> Float[Tensor, "b t h d"]:
        return columns.unflatten(-1, (self.heads, -1))

    def parts(self, rest: Float[Tensor, "b t c"]) -> list[Tensor | None]:
        """The values, (B, T, H, d), and the other columns, None for no part."""
        sizes = self.columns
        values, *others = rest[..., : sum(sizes)].split_with_sizes(sizes, -1)
        return [self.by_heads(values), *(y if y.shape[-1] else None for y in others)]

    def pair(self, values: Float[Tensor, "b t h d"]) -> tuple[Tensor, Tensor]:
        """Those whose mean is read, and those whose free energy is."""
        return values[..., : self.mean], values[..., self.width - self.free :]

    def eta(self, x: Float[Tensor, "b t f"], scale: Float[Tensor, "v c"]) -> Float[Tensor, "b t h d"]:
        """W_v h, of the conditioner's features h behind the layer's input."""
        return self.by_heads(F.linear(x[..., -self.context :].flatten(0, 1), scale).view(*x.shape[:2], -1))


class LinearOptions(NamedTuple):
    """What a read is called with beside tensors."""

    form: LinearForm
    eps: float
    beta_start: float  # beta = softplus(theta + beta_start)


def logits_of(gates: Sequence[Tensor | None], ups: Sequence[Tensor | None]) -> list[Float[Tensor, "n w"] | None]:
    """U z + b of slim gates."""
    pairs = zip(gates, ups[::2], ups[1::2])
    return [None if z is None else F.linear(z.flatten(0, 1), up, bias) for z, up, bias in pairs]


class ScanSizes(NamedTuple):
    """Widths of a head's mean, free energy and keys, and what kernels are built for."""

    mean: int
    free: int
    key: int
    width: int  # of the sums, and of the items
    rows: int  # of a tile
    constants: dict[str, int]

    @classmethod
    @lru_cache(256)
    def of(cls, mean: int, free: int, key: int) -> ScanSizes:
        power = next_power_of_2
        width = 16 * cdiv(mean + free + 2, 16)
        blocks = {"COLUMNS": power(max(free, 1)), "BROAD": power(max(mean, 1)), "WIDE": power(key)}
        rows = max(1, NUMBERS // max(blocks.values()))
        widths = {"MEAN": mean, "FREE": free, "KEY": key, "WIDTH": width}
        rest = power(width - mean - free)
        return cls(
            mean, free, key, width, rows, {**widths, **blocks, "ROWS": rows, "REST": rest, "WHOLE": power(width)}
        )

    def tiles(self, rows: int) -> int:
        return cdiv(rows, self.rows)

    def launch(self, kernel, grid: tuple[int, int, int], *arguments, **constants: int) -> None:
        """Launch a kernel with those of the constants that it has."""
        fitting = {name: x for name, x in self.constants.items() if name in kernel.arg_names}
        kernel[grid](*arguments, **fitting | constants)


def width_of(g: Float[Tensor, "b t h"] | Float[Tensor, "b t h dk"]) -> int:
    """How many decays a head has."""
    return 1 if g.ndim == 3 else g.shape[3]
