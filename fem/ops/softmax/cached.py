"""The softmax read over a cache that holds [v | e]: one attention call, and no exponential over the cache.

As `packing`, but that the shift c of a channel is fixed when its first token arrives, so that a value is written once,
by whatever keeps the cache; and that beta decides in which channels e is exp(beta f) - 1, as no span is known.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fem.ops.common.packing import Packing
from fem.ops.common.precision import upcast
from fem.ops.common.read import Read
from fem.ops.common.transforms import may_look

SMALL_BETA = 0.1  # below it e is exp(beta f) - 1, c = 0
REACH = {torch.float64: 700.0, torch.float32: 80.0, torch.bfloat16: 80.0, torch.float16: 9.5}  # largest |z|, in nats
PROVEN = 30.0  # nats: see `proven`
LARGEST = math.exp(PROVEN)


def small_beta(beta: Tensor) -> Bool[Tensor, "..."] | None:
    """Where beta is small; None where that is known to be nowhere, which is looked at on a CPU."""
    return None if beta.numel() and may_look(beta) and beta.amin().item() >= SMALL_BETA else beta < SMALL_BETA


def fixed_packing(beta: Tensor, shift: Tensor) -> Packing:
    """How values are written into a cache, with a shift of 0 where beta is small."""
    small = small_beta(beta)
    return Packing(beta, shift if small is None else shift.masked_fill(small, 0.0), small)


def pack(v: Float[Tensor, "*n d"], f: Float[Tensor, "*n df"], packing: Packing) -> Float[Tensor, "*n w"]:
    """[v | e] in the dtype of v, to be attended to as values are; `packing` broadcasts against f.

    e is right while |beta (f - c)| <= REACH[v.dtype] nats, and clipped there beyond; v never is. In bfloat16 e, the
    attention's weights and R keep 8 binary digits each, so that F is off by up to 4 * 2^-9 / beta.
    """
    z = packing.exponents(upcast(f)).clamp_(-REACH[v.dtype], REACH[v.dtype])
    return torch.cat([v, packing.energies(z).to(v.dtype)], -1)


def pack_to_be_proven(v: Float[Tensor, "*n d"], f: Float[Tensor, "*n df"], packing: Packing) -> Float[Tensor, "*n w"]:
    """`pack`, with inf for an e so large that it could hide what a read over the cache loses: see `proven`."""
    z = packing.exponents(upcast(f))
    e = packing.energies(z)
    if not (may_look(e) and e.sum().item() <= LARGEST):  # their sum bounds each: looked at in half the time
        e.masked_fill_(z > PROVEN, torch.inf)
    return torch.cat([v, e.to(v.dtype)], -1)


def unpack(out: Float[Tensor, "*n w"], packing: Packing) -> Read:
    """Mean and free energy from [mean | R], in float32 at least; a row that sees no key, whose R is 0, reads 0."""
    out = upcast(out)
    mean, total = out.tensor_split((out.shape[-1] - packing.beta.shape[-1],), -1)
    sees = total != 0
    sees = sees if packing.small is None else sees | packing.small
    free_energy = packing.shift + packing.logarithm(total.where(sees, 1.0)) / packing.beta
    return Read(mean, torch.where(sees, free_energy, 0.0))


def unpacked(
    values: Float[Tensor, "b h t w"], packing: Packing | None, split: bool, channels: int
) -> tuple[Tensor, Tensor | None]:
    """v and f of a cache; f is None where it is v. Of [v | e] with an f of its own, f = c + log(e) / beta."""
    if not split:
        return (values if packing is None else values[..., : values.shape[-1] - channels]), None
    v, second = values.split_with_sizes((values.shape[-1] - channels, channels), -1)
    if packing is None:
        return v, second
    return v, (packing.shift + packing.logarithm(upcast(second)) / packing.beta).to(values.dtype)


def proven(total: Float[Tensor, "*n d"], small: Bool[Tensor, "..."] | None) -> Bool[Tensor, "*n d"]:
    """Whether R gives F to the last digits of float32, for values of `pack_to_be_proven` and up to 10^5 keys.

    No e exceeds e^30, so what underflow takes from p takes at most T e^-57 from R, nothing beside R >= e^-30.
    Where beta is small, R keeps the digits of F while it stays near 1.
    """
    fine = (total >= math.exp(-PROVEN)) & (total < torch.inf) | (total == 0)
    return fine if small is None else torch.where(small, (total > -0.75) & (total < 3.0), fine)
