"""What the composed read needs besides in a graph of `torch.export`: a mask of all pairs, and the definition."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fem.ops.common.precision import upcast
from fem.ops.common.read import LOG_ZERO
from fem.ops.common.steps import along_time, without_gradient
from fem.ops.softmax.support import Intervals


def mask_of(
    q: Tensor, k: Tensor, bias: Tensor | None, keep: Tensor | None, seen: Intervals | None, causal: bool
) -> tuple[Float[Tensor, "#b #h tq t"], Bool[Tensor, "#b tq #h 1"]]:
    """What is added to the scores, and which rows see anything."""
    queries, keys = q.shape[1], k.shape[1]
    allowed = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=q.device)
    if seen is not None:
        allowed = seen.allowed(keys)[:, None]
    elif causal:
        allowed = allowed.tril()
    if keep is not None:
        allowed = allowed & keep[:, None, None]
    if bias is not None:
        allowed = allowed & ~torch.isneginf(bias)
    zero = torch.zeros((), dtype=upcast(q).dtype, device=q.device)
    mask = torch.where(allowed, zero if bias is None else upcast(bias), LOG_ZERO)
    return mask, allowed.any(-1, keepdim=True).transpose(1, 2)


def definition_where(
    doubtful: Bool[Tensor, "b tq h df"],
    free_energy: Float[Tensor, "b tq h df"],
    q: Float[Tensor, "b tq h dk"],
    k: Float[Tensor, "b t hkv dk"],
    f: Float[Tensor, "b t hkv df"],
    beta: Float[Tensor, "hkv df"],
    mask: Float[Tensor, "#b #h #tq #t"],
    scale: float,
) -> Float[Tensor, "b tq h df"]:
    """The free energies; where any is doubtful, all of these from the definition, under `torch.cond`."""
    heads = q.shape[2]
    per_head = lambda x, dim: upcast(x).repeat_interleave(heads // x.shape[dim], dim)  # noqa: E731
    beta = per_head(beta, 0)
    k, level = per_head(k, 2), beta * per_head(f, 2)
    mask = mask.expand(q.shape[0], heads, q.shape[1], k.shape[1])  # of whole shapes: none is broadcast
    lift, doubtful, q, k, level = (x.transpose(1, 2) for x in (free_energy * beta, doubtful, q, k, level))
    recomputed = lambda *given: torch.where(doubtful, _definition(*given, scale), lift)  # noqa: E731
    proven = lambda *given: lift.clone()  # noqa: E731
    with without_gradient():
        return torch.cond(doubtful.any(), recomputed, proven, (q, k, level, mask)).transpose(1, 2) / beta


def _definition(q, k, level, mask, scale: float) -> Float[Tensor, "b h tq df"]:
    """beta F = log sum_i e^{s_i + beta f_i} - log sum_i e^{s_i}, one key after another, in float64."""
    scores = scale * q.double() @ k.double().mT + mask.double()
    start = scores.new_full((*scores.shape[:3], level.shape[3]), LOG_ZERO)
    add = lambda total, s, y: ([torch.logaddexp(total[0], s + y)], [])  # noqa: E731
    each = scores.permute(0, 3, 1, 2)[..., None], level.double().transpose(1, 2)[:, :, :, None]
    (total,), _ = along_time(add, [start], *each)
    return (total - scores.logsumexp(-1, keepdim=True)).to(q.dtype)
