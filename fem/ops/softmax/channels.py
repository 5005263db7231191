"""The table of channels that the softmax kernels read, and the least R of which an entry is proven."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

LIFT = 15  # P and E reach up to 2^15 in float16
PROVEN = math.exp(-60.0)  # in float32


def channel_tables(
    beta: Float[Tensor, "h dv"], low: Float[Tensor, "b h dv"], high: Float[Tensor, "b h dv"], half: int, float16: bool
) -> Float[Tensor, "2 b h 6 half"]:
    """beta log2(e), c, a, the unit of v, that of E, and a row for the least R: of [v | E] as stored, and as formed.

    low, high: of v. c is the integer above every w = beta v log2(e), LIFT less in float16; where |w| < 1, a = 1, c = 0.
    """
    rate = (beta.float() * math.log2(math.e)).expand_as(high)
    low, high = (torch.where(high < low, 0.0, bound) for bound in (low, high))
    largest = torch.maximum(high, -low)
    near = largest * rate < 1
    shift = torch.where(near, 0.0, (high * rate).ceil())
    one = torch.ones_like(rate)
    zero = torch.zeros_like(rate)
    formed = stored = torch.stack([rate, shift, near.float(), one, one, zero], 2)
    if float16:
        unit = torch.where(near, _unit(largest * rate), 1.0)
        stored = torch.stack([rate, torch.where(near, 0.0, shift - LIFT), near.float(), _unit(largest), unit, zero], 2)
    tables = torch.nn.functional.pad(torch.stack([stored, formed]), (0, half - rate.shape[-1]))
    tables[..., [0, 3, 4], rate.shape[-1] :] = 1.0
    return tables


def least_totals(
    stored: Float[Tensor, "b h 6 half"], sums: Float[Tensor, "b h half"], float16: bool
) -> Float[Tensor, "b h half"]:
    """The R above which what P and E flush is less than 2^-9 (float16) or 2^-24 of it, whatever the prior; 0 for a = 1.

    In float16 P loses at most 2^-39 of the sum of E, in the units of E, and E 2^-25. In float32 both lose 2^-126.
    """
    least = torch.clamp(sums * 2.0**-30, min=2.0**-15) if float16 else torch.full_like(sums, PROVEN)
    return torch.where((stored[:, :, 2] > 0) | (sums == 0), 0.0, least)


def _unit(largest: Tensor) -> Tensor:
    """The power of two that brings `largest` to at most 2^LIFT."""
    exponent = torch.frexp(largest).exponent.clamp(-100, 100)
    return torch.ldexp(torch.ones_like(largest), torch.where(largest > 0, exponent - LIFT, 0))
