"""The softmax read in plain steps, pair by pair and channel by channel: what PyTorch can transform in any way."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fem.ops.common.read import LOG_ZERO, Read
from fem.ops.softmax.support import Intervals


def differentiable_read(
    q: Float[Tensor, "b tq h dk"],
    k: Float[Tensor, "b t hkv dk"],
    v: Float[Tensor, "b t hkv dv"],
    f: Float[Tensor, "b t hkv df"],
    beta: Float[Tensor, "hkv df"],
    bias: Float[Tensor, "#b #h #tq #t"] | None,
    keep: Bool[Tensor, "b t"] | None,
    first: Tensor | None,
    end: Tensor | None,
    causal: bool,
    scale: float,
) -> Read:
    """The mean of v and the free energy of f in float64; time and memory grow with T_q T d_f.

    m_j = sum_i p_i f_ij        F_j = m_j + (1 / beta_j) log sum_i p_i exp(beta_j (f_ij - m_j))
    """
    queries, heads, time = q.shape[1], q.shape[2], k.shape[1]
    per_head = lambda x, dim: x.double().repeat_interleave(heads // x.shape[dim], dim)  # noqa: E731
    scores = torch.einsum("bthc,bihc->bhti", q.double(), per_head(k, 2)) * scale
    if bias is not None:
        scores = scores + bias.double()
    seen = torch.ones(queries, time, dtype=torch.bool, device=q.device)
    if first is not None:
        seen = Intervals(first, end).allowed(time)[:, None]
    elif causal:
        seen = seen.tril(time - queries)
    if keep is not None:
        seen = seen & keep[:, None, None]
    seen = seen & ~torch.isneginf(scores.detach())
    empty = ~seen.any(-1, keepdim=True)
    log_p = torch.where(seen, scores, -torch.inf).masked_fill(empty, 0.0).log_softmax(-1).masked_fill(~seen, LOG_ZERO)
    p = log_p.exp()
    nobody = ~seen.any(-2)[..., None]  # whose values are multiplied by nothing but 0
    v, f = (per_head(x, 2).transpose(1, 2).masked_fill(nobody, 0.0) for x in (v, f))
    middle, beta = p @ f, per_head(beta, 0)[:, None]
    away = beta[:, :, None] * (f[:, :, None] - middle[:, :, :, None])
    free_energy = middle + (log_p[..., None] + away).logsumexp(-2) / beta
    return Read((p @ v).transpose(1, 2), free_energy.masked_fill(empty, 0.0).transpose(1, 2))
