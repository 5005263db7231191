"""The softmax read over a cache that holds [v | e]: one attention call, and no exponential over the cache.

    e = exp(beta (v - c))        [mean | R] = p @ [v | e]        F = c + log(R) / beta                    (Eq. 4)

The shift c of a channel is fixed when its first token arrives, so a value is written once, by whatever keeps the cache.
Channels of a small beta hold e = exp(beta v) - 1 instead, and F = log(1 + R) / beta, which keeps the digits of F.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fem.ops.common.precision import upcast
from fem.ops.common.read import Read
from fem.ops.common.transforms import may_look

SMALL_BETA = 0.1  # below it e is exp(beta v) - 1
REACH = {torch.float64: 700.0, torch.float32: 80.0, torch.bfloat16: 80.0, torch.float16: 9.5}  # largest |z|, in nats
PROVEN = 30.0  # nats: see `proven`
LARGEST = math.exp(PROVEN)


def exponents(v: Float[Tensor, "*n"], beta: Float[Tensor, "..."], shift: Float[Tensor, "..."]) -> Float[Tensor, "*n"]:
    """z = beta (v - c) in float32 at least, c = 0 where beta is small. Beyond +-REACH[v.dtype], `pack` clips."""
    return _exponents(v, beta, shift, small_beta(beta))


def _exponents(v: Tensor, beta: Tensor, shift: Tensor, small: Tensor | None) -> Tensor:
    return (upcast(v) - (shift if small is None else shift.masked_fill(small, 0.0))) * beta


def _energies(z: Tensor, small: Tensor | None) -> Tensor:
    return z.exp() if small is None else torch.where(small, z.expm1(), z.exp())


def pack(v: Float[Tensor, "*n d"], beta: Float[Tensor, "..."], shift: Float[Tensor, "..."]) -> Float[Tensor, "*n w"]:
    """[v | e] in the dtype of v, to be attended to as values are; beta > 0 and the shift broadcast against v.

    e is right while |beta (v - c)| <= REACH[v.dtype] nats, and clipped there beyond; v never is. In bfloat16 e, the
    attention's weights and R keep 8 binary digits each, so that F is off by up to 4 * 2^-9 / beta.
    """
    small = small_beta(beta)
    z = _exponents(v, beta, shift, small).clamp_(-REACH[v.dtype], REACH[v.dtype])
    return torch.cat([v, _energies(z, small).to(v.dtype)], -1)


def pack_to_be_proven(
    v: Float[Tensor, "*n d"], beta: Float[Tensor, "..."], shift: Float[Tensor, "..."], small: Bool[Tensor, "..."] | None
) -> Float[Tensor, "*n w"]:
    """`pack`, with inf for an e so large that it could hide what a read over the cache loses: see `proven`.

    small: `small_beta(beta)`, which a stream looks for once.
    """
    z = _exponents(v, beta, shift, small)
    e = _energies(z, small)
    if not (may_look(e) and e.sum().item() <= LARGEST):  # their sum bounds each: looked at in half the time
        e.masked_fill_(z > PROVEN, torch.inf)
    return torch.cat([v, e.to(v.dtype)], -1)


def unpack(out: Float[Tensor, "*n w"], beta: Float[Tensor, "..."], shift: Float[Tensor, "..."]) -> Read:
    """Mean and free energy from [mean | R], in float32 at least; beta and the shift broadcast against the mean.

    A row that sees no key, whose attention gives 0, reads 0.
    """
    (mean, total), small = upcast(out).chunk(2, -1), small_beta(beta)
    sees = total != 0  # NaN does
    logarithm = total.where(sees, 1.0).log_()
    if small is not None:
        sees, shift = sees | small, shift.masked_fill(small, 0.0)
        logarithm = torch.where(small, total.log1p(), logarithm)
    return Read(mean, torch.where(sees, shift + logarithm / beta, 0.0))


def proven(out: Float[Tensor, "*n w"], beta: Float[Tensor, "..."]) -> Bool[Tensor, "*n d"]:
    """Whether R gives F to the last digits of float32, for values of `pack_to_be_proven` and up to 10^5 keys.

    No e exceeds e^30, so what underflow takes from p takes at most T e^-57 from R, nothing beside R >= e^-30.
    Where beta is small, R keeps the digits of F while it stays near 1.
    """
    total, small = upcast(out).chunk(2, -1)[1], small_beta(beta)
    fine = (total >= math.exp(-PROVEN)) & (total < torch.inf) | (total == 0)
    return fine if small is None else torch.where(small, (total > -0.75) & (total < 3.0), fine)


def small_beta(beta: Tensor) -> Bool[Tensor, "..."] | None:
    """Where beta is small; None where that is known to be nowhere, which is looked at on a CPU."""
    return None if beta.numel() and may_look(beta) and beta.amin().item() >= SMALL_BETA else beta < SMALL_BETA
