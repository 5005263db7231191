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


def packing(beta: Tensor, shift: Tensor) -> Packing:
    """What a stream writes its values with: its shift, and 0 where beta is small."""
    small = small_beta(beta)
    return Packing(beta, shift if small is None else shift.masked_fill(small, 0.0), small)


def exponents(f: Float[Tensor, "*n"], beta: Float[Tensor, "..."], shift: Float[Tensor, "..."]) -> Float[Tensor, "*n"]:
    """z = beta (f - c) in float32 at least, c = 0 where beta is small. Beyond +-REACH[f.dtype], `pack` clips."""
    return packing(beta, shift).exponents(upcast(f))


def pack(
    v: Float[Tensor, "*n d"],
    beta: Float[Tensor, "..."],
    shift: Float[Tensor, "..."],
    free_values: Float[Tensor, "*n df"] | None = None,
) -> Float[Tensor, "*n w"]:
    """[v | e] in the dtype of v, to be attended to as values are; beta > 0 and the shift broadcast against f.

    e is right while |beta (f - c)| <= REACH[v.dtype] nats, and clipped there beyond; v never is. In bfloat16 e, the
    attention's weights and R keep 8 binary digits each, so that F is off by up to 4 * 2^-9 / beta.
    """
    how, f = packing(beta, shift), v if free_values is None else free_values
    z = how.exponents(upcast(f)).clamp_(-REACH[v.dtype], REACH[v.dtype])
    return torch.cat([v, how.energies(z).to(v.dtype)], -1)


def pack_to_be_proven(v: Float[Tensor, "*n d"], f: Float[Tensor, "*n df"], how: Packing) -> Float[Tensor, "*n w"]:
    """`pack`, with inf for an e so large that it could hide what a read over the cache loses: see `proven`."""
    z = how.exponents(upcast(f))
    e = how.energies(z)
    if not (may_look(e) and e.sum().item() <= LARGEST):  # their sum bounds each: looked at in half the time
        e.masked_fill_(z > PROVEN, torch.inf)
    return torch.cat([v, e.to(v.dtype)], -1)


def unpack(out: Float[Tensor, "*n w"], beta: Float[Tensor, "..."], shift: Float[Tensor, "..."]) -> Read:
    """Mean and free energy from [mean | R], in float32 at least; beta and the shift broadcast against R.

    A row that sees no key, whose attention gives 0, reads 0.
    """
    how, out = packing(beta, shift), upcast(out)
    total = out[..., -beta.shape[-1] :]
    sees = total != 0  # NaN does
    sees = sees if how.small is None else sees | how.small
    free_energy = how.shift + how.logarithm(total.where(sees, 1.0)) / beta
    return Read(out[..., : -beta.shape[-1]], torch.where(sees, free_energy, 0.0))


def unpacked(
    values: Float[Tensor, "b h t w"], how: Packing | None, split: bool, channels: int
) -> tuple[Tensor, Tensor | None]:
    """v and f of a cache; f is None where it is v. Of [v | e] with an f of its own, f = c + log(e) / beta."""
    if not split:
        return (values if how is None else values[..., : values.shape[-1] - channels]), None
    v, second = values.split_with_sizes((values.shape[-1] - channels, channels), -1)
    if how is None:
        return v, second
    return v, (how.shift + how.logarithm(upcast(second)) / how.beta).to(values.dtype)


def proven(total: Float[Tensor, "*n d"], small: Bool[Tensor, "..."] | None) -> Bool[Tensor, "*n d"]:
    """Whether R gives F to the last digits of float32, for values of `pack_to_be_proven` and up to 10^5 keys.

    No e exceeds e^30, so what underflow takes from p takes at most T e^-57 from R, nothing beside R >= e^-30.
    Where beta is small, R keeps the digits of F while it stays near 1.
    """
    fine = (total >= math.exp(-PROVEN)) & (total < torch.inf) | (total == 0)
    return fine if small is None else torch.where(small, (total > -0.75) & (total < 3.0), fine)
