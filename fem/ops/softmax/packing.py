"""[v | e]: the values beside exponentials of the values whose free energy is read, and the way back.

    e = exp(beta (f - c))        [mean | R] = p @ [v | e]        F = c + log(R) / beta                    (Eq. 4)

In a channel where beta (max f - min f) is small, e is exp(.) - 1 and F = c + log(1 + R) / beta: all e are near 1 there,
and the difference from 1 is what F is made of.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fem.ops.common.backend import may_look
from fem.ops.common.precision import LEAST_PROVEN

_LOG_2 = math.log(2)
SMALL_SPAN = 1.0  # nats: from here on, 1 + R loses no more than R itself would
_LARGEST_LEVEL = 2.0**23  # float32 has no fractions beyond it, so that rounding up to an integer means nothing


class Packing(NamedTuple):
    """The temperatures and the shift c of a read, and the channels in which e is exp(.) - 1; None: none are."""

    beta: Float[Tensor, "..."]
    shift: Float[Tensor, "..."]
    small: Bool[Tensor, "..."] | None

    @classmethod
    def of(cls, f: Float[Tensor, "b t *d"], beta: Float[Tensor, "..."]) -> Packing:
        """For tokens along dimension 1: c is the largest f.

        Where e is rounded to few digits, a later token must not change how: c is lifted so that beta c is a multiple of
        log 2, and e changes by a power of 2.
        """
        level, rate = f.detach(), beta.detach()
        low, high = level.amin(1, keepdim=True), level.amax(1, keepdim=True)
        small = (high - low) * rate < SMALL_SPAN
        bits = rate / _LOG_2
        lifted = torch.where((high * bits).abs() < _LARGEST_LEVEL, (high * bits).ceil() / bits, high)
        shift = torch.where(small, high, lifted)
        return cls(beta, shift, None if may_look(small) and not bool(small.any()) else small)

    def exponents(self, f: Tensor) -> Tensor:
        """z = beta (f - c)."""
        return (f - self.shift) * self.beta

    def energies(self, z: Tensor) -> Tensor:
        """e from z."""
        return z.exp() if self.small is None else torch.where(self.small, z.expm1(), z.exp())

    def logarithm(self, total: Tensor) -> Tensor:
        """z from e, or beta (F - c) from R."""
        if self.small is None:
            return total.log()
        near, far = torch.where(self.small, total, 0.0), torch.where(self.small, 1.0, total)
        return torch.where(self.small, near.log1p(), far.log())

    def slope(self, e: Tensor) -> Tensor:
        """exp(z) from e."""
        return e if self.small is None else torch.where(self.small, e + 1.0, e)

    def doubtful(self, total: Tensor) -> Bool[Tensor, "..."]:
        """Where R is so small that underflow may have taken digits from it."""
        doubtful = total < LEAST_PROVEN[total.dtype]
        return doubtful if self.small is None else doubtful & ~self.small

    def per_query_head(self, heads: int) -> Packing:
        """The same for a read whose queries share key heads."""
        return Packing(*(None if x is None else x.repeat_interleave(heads // x.shape[-2], -2) for x in self))
