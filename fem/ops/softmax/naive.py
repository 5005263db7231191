"""The softmax read in float64, by loops over its definition: slow, differentiable by plain autograd.

The tests compare every implementation with it; it shares no code with what it tests.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from fem.ops.common.read import Read


def naive_softmax_read(
    q: Float[Tensor, "b tq h dk"],
    k: Float[Tensor, "b t hkv dk"],
    v: Float[Tensor, "b t hkv dv"],
    beta: Float[Tensor, "hkv df"] | None,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    bias: Float[Tensor, "..."] | None = None,
    key_mask: Shaped[Tensor, "b t"] | None = None,
    segment_ids: Int[Tensor, "b t"] | None = None,
    free_values: Float[Tensor, "b t hkv df"] | None = None,
) -> Read:
    """The mean of v and the free energy of f = free_values (None: v), entry by entry, in float64.

    p_ti = softmax_i(scale q_t . k_i + bias_ti) over the allowed i
    mean_tj = sum_i p_ti v_ij        F_tj = (1 / beta_j) log sum_i p_ti exp(beta_j f_ij)        (Eq. 4)
    """
    q, k, v = q.double(), k.double(), v.double()
    f = v if free_values is None else free_values.double()
    batch, queries, heads, width = q.shape
    time, groups = k.shape[1], heads // k.shape[2]
    scale = width**-0.5 if scale is None else scale
    if bias is not None:
        bias = bias.double().expand(batch, heads, queries, time)
    means, free_energies = [], []
    for b in range(batch):
        allowed = _allowed(
            queries,
            time,
            causal,
            window,
            [True] * time if key_mask is None else [bool(m) for m in key_mask[b].tolist()],
            [0] * time if segment_ids is None else segment_ids[b].tolist(),
            segment_ids is not None,
        ).to(q.device)
        for h in range(heads):
            g = h // groups
            s = scale * (q[b, :, None, h, :] * k[b, None, :, g, :]).sum(-1)
            if bias is not None:
                s = s + bias[b, h]
            seen = allowed & ~torch.isneginf(s.detach())
            empty = ~seen.any(1, keepdim=True)
            s = torch.where(seen, s, -torch.inf).masked_fill(empty, 0.0)
            p = torch.softmax(s, 1)
            log_p = torch.log_softmax(s, 1)
            means.append((p @ v[b, :, g]).masked_fill(empty, 0.0))
            if beta is not None:
                bj = beta[g].double()
                exponent = log_p[:, :, None] + (bj * f[b, :, g])[None]
                free_energies.append((torch.logsumexp(exponent, 1) / bj).masked_fill(empty, 0.0))
    stacked = lambda parts: torch.stack(parts).unflatten(0, (batch, heads)).transpose(1, 2)  # noqa: E731
    return Read(stacked(means), None if beta is None else stacked(free_energies))


def _allowed(queries, time, causal, window, keep, ids, packed) -> Tensor:
    document, position = [], []
    last, number, place = None, 0, -1
    for i in range(time):
        if keep[i]:
            if packed and last is not None and ids[i] != last:
                number, place = number + 1, -1
            last, place = ids[i], place + 1
        document.append(number)
        position.append(max(place, 0))
    allowed = torch.zeros(queries, time, dtype=torch.bool)
    for row in range(queries):
        t = row + time - queries
        for i in range(time):
            if not keep[i] or (causal and i > t):
                continue
            if packed and document[i] != document[t]:
                continue
            if window is not None and abs(position[t] - position[i]) >= window:
                continue
            allowed[row, i] = True
    return allowed
