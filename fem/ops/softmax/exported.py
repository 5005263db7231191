"""The softmax read for `torch.export`: exact at any length, without reading a value back."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from fem.ops.common.precision import LEAST_PROVEN, upcast
from fem.ops.common.read import LOG_ZERO, Read
from fem.ops.common.steps import along_time, portable, without_gradient
from fem.ops.softmax.recompute import recompute
from fem.ops.softmax.support import Intervals


def exported_read(
    q: Float[Tensor, "b tq h dk"],
    k: Float[Tensor, "b t hkv dk"],
    v: Float[Tensor, "b t hkv dv"],
    beta: Float[Tensor, "hkv dv"] | None,
    bias: Float[Tensor, "#b #h #tq #t"] | None,
    keep: Bool[Tensor, "b t"] | None,
    seen: Intervals | None,
    causal: bool,
    scale: float,
) -> Read:
    """Mean and free energy by one attention over [v | e], e = exp(beta v - c), as `composed_read`.

    Pairs are restricted by a T x T mask. Where R < e^-60 does not prove an entry, all of these are computed from the
    definition, under `torch.cond` where the graph is to be `portable`. A NaN may reach rows that do not see its token.
    """
    heads = q.shape[2]
    per_head = lambda x, dim: upcast(x).repeat_interleave(heads // x.shape[dim], dim)  # noqa: E731
    q, k, v = (x.transpose(1, 2) for x in (upcast(q), per_head(k, 2), per_head(v, 2)))
    if keep is not None:
        v = v.masked_fill(~keep[:, None, :, None], 0.0)
    mask, sees = _mask(q, k, bias, keep, seen, causal)
    if beta is None:
        return Read(_seen(_attend(q, k, v, mask, causal, scale), sees), None)
    beta = per_head(beta, 0)[:, None]
    level = beta * v
    high, low = (x.detach() for x in (level.amax(2, keepdim=True), level.amin(2, keepdim=True)))
    near = torch.maximum(high, -low) < 1  # expm1 and log1p: a small beta magnifies no rounding
    shift = torch.where(near, 0.0, high)
    e = torch.where(near, torch.expm1(torch.where(near, level, 0.0)), torch.exp(level - shift))
    mean, total = _attend(q, k, torch.cat([v, e], -1), mask, causal, scale).chunk(2, -1)
    doubtful = ~near & (total < LEAST_PROVEN[torch.float32])
    close, far = torch.where(near, total, 0.0).log1p(), torch.where(near | doubtful, 1.0, total).log()
    logarithm = torch.where(near, close, far)
    lift = logarithm + shift
    if portable():
        lift = _recomputed(lift, doubtful, q, k, level, mask, causal, scale)
        return Read(_seen(mean, sees), _seen(lift / beta, sees))
    by_token = (x.transpose(1, 2) for x in (lift / beta, doubtful, q, k, v))
    free_energy = recompute(*by_token, beta[:, 0], mask, None, causal and mask is None, scale).transpose(1, 2)
    return Read(_seen(mean, sees), _seen(free_energy, sees))


def _attend(q, k, values, mask, causal: bool, scale: float) -> Float[Tensor, "b h tq w"]:
    return F.scaled_dot_product_attention(q, k, values, mask, is_causal=causal and mask is None, scale=scale)


def _seen(x: Float[Tensor, "b h tq d"], sees: Bool[Tensor, "#b #h tq 1"] | None) -> Float[Tensor, "b tq h d"]:
    return (x if sees is None else torch.where(sees, x, 0.0)).transpose(1, 2)


def _mask(
    q: Tensor, k: Tensor, bias: Tensor | None, keep: Tensor | None, seen: Intervals | None, causal: bool
) -> tuple[Float[Tensor, "#b #h tq t"] | None, Bool[Tensor, "#b #h tq 1"] | None]:
    """What is added to the scores, and which rows see anything; None and None: what causality alone says."""
    if bias is None and keep is None and seen is None:
        return None, None
    allowed = torch.ones(1, 1, q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
    if seen is not None:
        allowed = seen.allowed(k.shape[2])[:, None]
    elif causal:
        allowed = allowed.tril()
    if keep is not None:
        allowed = allowed & keep[:, None, None]
    if bias is not None:
        allowed = allowed & ~torch.isneginf(bias)
    mask = torch.where(allowed, q.new_zeros(()) if bias is None else upcast(bias), LOG_ZERO)
    return mask, allowed.any(-1, keepdim=True)


def _recomputed(lift, doubtful, q, k, level, mask, causal: bool, scale: float) -> Float[Tensor, "b h tq d"]:
    """beta F; where any is doubtful, all of these from the definition. Tensors of whole shapes: none is broadcast."""
    queries, keys = q.shape[2], k.shape[2]
    if mask is None:
        every = q.new_ones(queries, keys, dtype=torch.bool)
        mask = q.new_zeros(()).masked_fill(every.triu(1) if causal else ~every, LOG_ZERO)
    mask = mask.expand(q.shape[0], q.shape[1], queries, keys)
    recomputed = lambda *given: torch.where(doubtful, _definition(*given, scale), lift)  # noqa: E731
    proven = lambda *given: lift.clone()  # noqa: E731
    with without_gradient():
        return torch.cond(doubtful.any(), recomputed, proven, (q, k, level, mask))


def _definition(q, k, level, mask, scale: float) -> Float[Tensor, "b h tq d"]:
    """beta F = log sum_i e^{s_i + beta v_i} - log sum_i e^{s_i}, one key after another, in float64."""
    scores = scale * q.double() @ k.double().mT + mask.double()
    start = scores.new_full((*scores.shape[:3], level.shape[3]), LOG_ZERO)
    add = lambda total, s, y: ([torch.logaddexp(total[0], s + y)], [])  # noqa: E731
    each = scores.permute(0, 3, 1, 2)[..., None], level.double().transpose(1, 2)[:, :, :, None]
    (total,), _ = along_time(add, [start], *each)
    return (total - scores.logsumexp(-1, keepdim=True)).to(q.dtype)
