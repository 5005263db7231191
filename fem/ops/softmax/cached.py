"""The softmax read over a cache that holds [v | e]: one attention call, and no exponential over the cache.

As `packing`, but that the shift c of a channel is fixed when its first token arrives, so that a value is written once,
by whatever keeps the cache; and that beta decides in which channels e is exp(beta f) - 1, as no span is known.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from fem.ops.common.backend import differentiated, may_look, transformed
from fem.ops.common.precision import fallbacks, upcast, without_autocast
from fem.ops.common.read import Read, rounded
from fem.ops.common.tokens import Tokens
from fem.ops.softmax.attend import flash
from fem.ops.softmax.packing import Packing
from fem.ops.softmax.softmax_read import mask_of_one, softmax_read
from fem.ops.softmax.support import support

SMALL_BETA = 0.1  # below it e is exp(beta f) - 1, c = 0
REACH = {torch.float64: 700.0, torch.float32: 80.0, torch.bfloat16: 80.0, torch.float16: 9.5}  # largest |z|, in nats
_PROVEN, _LEAST = 30.0, 60.0  # nats: e^-60 times a weight of e^-27 is still a normal number of float32
_LARGEST = math.exp(_PROVEN)
_NEAR_LOG = math.log(4.0)  # nats: while |log(1 + R)| stays below, 1 + R keeps the digits of R


def fixed_packing(beta: Tensor, shift: Tensor) -> Packing:
    """How values are written into a cache, with a shift of 0 where beta is small."""
    if beta.numel() and may_look(beta) and beta.amin().item() >= SMALL_BETA:
        return Packing(beta, shift, None)
    small = beta < SMALL_BETA
    return Packing(beta, shift.masked_fill(small, 0.0), small)


def pack(v: Float[Tensor, "*n d"], f: Float[Tensor, "*n df"], packing: Packing) -> Float[Tensor, "*n w"]:
    """[v | e] in the dtype of v, to be attended to as values are; `packing` broadcasts against f.

    e is right while |beta (f - c)| <= REACH[v.dtype] nats, and clipped there beyond; v never is. In bfloat16 e, the
    attention's weights and R keep 8 binary digits each, so that F is off by up to 4 * 2^-9 / beta.
    """
    z = packing.exponents(upcast(f)).clamp_(-REACH[v.dtype], REACH[v.dtype])
    return torch.cat([v, packing.energies(z).to(v.dtype)], -1)


def unpack(out: Float[Tensor, "*n w"], packing: Packing) -> Read:
    """Mean and free energy from [mean | R], in float32 at least; a row that sees no key, whose R is 0, reads 0."""
    out = upcast(out)
    mean, total = out.tensor_split((out.shape[-1] - packing.beta.shape[-1],), -1)
    sees = total != 0
    sees = sees if packing.small is None else sees | packing.small
    free_energy = packing.shift + packing.logarithm(total.where(sees, 1.0)) / packing.beta
    return Read(mean, torch.where(sees, free_energy, 0.0))


# --- a cache of the library's own, on a CPU: what is not exact is known, and read from the values --------------------


def pack_exactly(
    v: Float[Tensor, "*n d"], f: Float[Tensor, "*n df"] | None, packing: Packing
) -> Float[Tensor, "*n w"] | None:
    """[v | e], with inf for an e beyond e^30, which could hide what a read over the cache loses; f: None where it is v.
    None where f could not be computed back from e, and where e would have to pass a gradient on."""
    if f is not None and (f.requires_grad or not may_look(f)):
        return None
    z = packing.exponents(upcast(v if f is None else f).detach())
    if f is not None and z.numel():
        low, high = (z if packing.small is None else torch.where(packing.small, _PROVEN * z, z)).aminmax()
        if not (low.item() > -_LEAST and high.item() < _PROVEN):  # exp(z) - 1 wants |z| < 1
            return None
    e = packing.energies(z)
    if not (may_look(e) and e.sum().item() <= _LARGEST):  # their sum bounds each: looked at in half the time
        e.masked_fill_(z > _PROVEN, torch.inf)
    return torch.cat([v, e.to(v.dtype)], -1)


def from_cache(
    values: Float[Tensor, "b h t w"], packing: Packing | None, split: bool, channels: int
) -> tuple[Tensor, Tensor | None]:
    """v and f of a cache; f is None where it is v. Of [v | e] with an f of its own, f = c + log(e) / beta."""
    if not split:
        return (values if packing is None else values[..., : values.shape[-1] - channels]), None
    v, second = values.split_with_sizes((values.shape[-1] - channels, channels), -1)
    if packing is None:
        return v, second
    return v, (packing.shift + packing.logarithm(upcast(second)) / packing.beta).to(values.dtype)


def cached_read(
    q: Float[Tensor, "b tq h dk"],
    keys: Float[Tensor, "b hkv t dk"],
    values: Float[Tensor, "b hkv t w"],
    beta: Float[Tensor, "hkv df"] | None,
    packing: Packing | None = None,
    *,
    split: bool = False,
    window: int | None = None,
    tokens: Tokens | None = None,
    backend: str = "auto",
) -> Read:
    """`softmax_read` of the last tokens over a cache, which has the heads first.

    packing: with which temperatures and shifts the values were packed as [v | e]: one token is then read by one
    attention over them, where that is proven to be exact. None: they are v, or with `split`, which says that the free
    energy is of other values f than v, [v | f].
    """
    k = keys.transpose(1, 2)
    one = packing is not None and q.shape[1] == 1 and len(q) and backend in ("auto", "sdpa") and may_look(q)
    if one and not (differentiated(q, keys, values, beta) or transformed(keys, values, beta)):
        rules = support(1, k.shape[1], k.device, True, q.shape[-1] ** -0.5, window, None, tokens)
        with without_autocast(q.device):
            read = _packed_step(q[:, 0], keys, values, packing, mask_of_one(rules, k), rules.scale)
        if read is not None:
            return rounded(read, torch.promote_types(q.dtype, values.dtype), beta)
    v, f = from_cache(values, packing, split, 0 if beta is None else beta.shape[-1])
    v, f = (None if x is None else x.transpose(1, 2) for x in (v, f))
    return softmax_read(q, k, v, beta, f, window=window, tokens=tokens, backend=backend)


def _packed_step(
    q: Float[Tensor, "b h d"], keys, values, packing: Packing, mask: Float[Tensor, "#b #hq t"] | None, scale: float
) -> Read | None:
    """The read of one query over [v | e] of `pack_exactly`, (B, 1, H, .), without gradients; None where R does not
    prove an entry: no e exceeds e^30, so what underflow takes from p takes at most T e^-57 from R, nothing beside
    R >= e^-30.
    """
    batch, heads, _ = q.shape
    q = q.unflatten(1, (keys.shape[1], -1))
    if mask is not None:
        mask = mask.expand(batch, heads, -1).unflatten(1, (keys.shape[1], -1))
    if keys.shape[-1] == values.shape[-1] and q.dtype == keys.dtype == values.dtype:
        out = upcast(flash(q, keys, values, False, None if mask is None else mask.to(q.dtype), scale)[0])
    else:
        scores = (upcast(q) * scale) @ upcast(keys).mT
        out = torch.nan_to_num((scores if mask is None else scores + mask).softmax(-1), 0.0) @ upcast(values)
    channels = packing.shift.shape[-1]
    mean, total = out.split_with_sizes((out.shape[-1] - channels, channels), -1)
    z = packing.logarithm(total)
    if packing.small is None:
        proven = torch.linalg.vector_norm(z, math.inf).item() <= _PROVEN
    else:
        proven = bool((z.abs() <= torch.where(packing.small, _NEAR_LOG, _PROVEN)).all())
    if not proven:
        return None
    fallbacks.count(z.numel(), 0)
    free_energy = torch.addcdiv(packing.shift, z, packing.beta)
    return Read(*(x.reshape(batch, 1, heads, x.shape[-1]) for x in (mean, free_energy)))
