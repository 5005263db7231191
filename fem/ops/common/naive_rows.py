"""The definitions of the recurrent reads in float64, row by row: slow, differentiable by plain autograd.

Tests compare every implementation with these loops, which share no code with them; backend="reference" runs them.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch
from torch import Tensor

from fem.ops.common.read import NO_WEIGHT, Read


def by_definition(definition, dtype, causal, tokens, initial_state, return_state, **options) -> Read:
    """The read by a definition, which takes masks and segment ids. Raises ValueError on states: it keeps none."""
    if initial_state is not None or return_state:
        raise ValueError(
            "backend='reference' reads whole sequences and keeps no state; use backend='auto' with states."
        )
    keep, document = (None, None) if tokens is None else (tokens.keep, tokens.document)
    read = definition(causal=causal, key_mask=keep, segment_ids=document, **options)
    return Read(*(None if part is None else part.to(dtype) for part in read))


def decays(log_decay: Tensor, t: int, seen: list[int]) -> Tensor:
    """sum_{i<r<=t} log_decay_r for every i of `seen` up to t, sum_{t<=r<i} for those after it; r runs over `seen`."""
    g, n = log_decay[seen], seen.index(t)
    past = g[1 : n + 1].flip(0).cumsum(0).flip(0)
    return torch.cat([past, torch.zeros_like(g[:1]), g[n:-1].cumsum(0)])


def read_rows(log_scores, v, beta, causal, key_mask, segment_ids, normalize, free_values=None) -> Read:
    """The read of every row t under log_scores(b, t, seen), (len(seen), H, d_v or 1), over its document's tokens."""
    batch, time = v.shape[:2]
    beta = None if beta is None else beta.double()
    f = v if free_values is None else free_values.double()
    rows = []
    for b in range(batch):
        kept = [t for t in range(time) if key_mask is None or key_mask[b, t]]
        ids = [0] * time if segment_ids is None else segment_ids[b].tolist()
        opens = [ids[i] != ids[t] for i, t in pairwise(kept)]
        document = dict(zip(kept, accumulate(opens, initial=0)))
        for t in range(time):
            seen = [i for i in kept if t in document and document[i] == document[t] and (i <= t or not causal)]
            if seen:
                rows.append(_read_row(log_scores(b, t, seen), v[b, seen], f[b, seen], beta, normalize))
            else:
                rows.append((torch.zeros_like(v[b, t]), torch.zeros_like(f[b, t])))
    mean, free_energy = (torch.stack(parts).unflatten(0, (batch, time)) for parts in zip(*rows))
    return Read(mean, None if beta is None else free_energy)


def _read_row(s: Tensor, v: Tensor, f: Tensor, beta: Tensor | None, normalize: bool) -> tuple[Tensor, Tensor]:
    """Mean of v and free energy of f (i, H, d_v) under the weights e^s, s (i, H, d_v or 1)."""
    empty = (s.detach() < NO_WEIGHT).all(0)
    s = s.masked_fill(empty, 0.0)
    log_p = s - s.logsumexp(0) if normalize else s
    mean = (log_p.exp() * v).sum(0).masked_fill(empty, 0.0)
    if beta is None:
        return mean, torch.zeros_like(f[0])
    return mean, ((log_p + beta * f).logsumexp(0) / beta).masked_fill(empty, 0.0)
