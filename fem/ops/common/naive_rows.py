"""The definitions of the reads in float64, row by row: slow, differentiable by plain autograd.

Tests compare every implementation with these loops, which share no code with them; backend="reference" runs them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fem.ops.common.read import Read
from fem.ops.common.scan import ScanCall


def by_definition(definition, dtype, call: ScanCall, **options) -> Read:
    """The read by a definition, which takes masks and segment ids. Raises ValueError on states: it keeps none."""
    if call.initial_state is not None or call.return_state:
        raise ValueError(
            "backend='reference' reads whole sequences and keeps no state; use backend='auto' with states."
        )
    marks = {"key_mask": call.tokens.keep, "segment_ids": call.tokens.document}
    read = definition(causal=call.causal, **marks, normalize=call.normalize, **options)
    return Read(*(None if part is None else part.to(dtype) for part in read))


def decays(log_decay: Tensor, t: int, seen: list[int]) -> Tensor:
    """sum_{i<r<=t} log_decay_r for every i of `seen` up to t, sum_{t<=r<i} for those after it; r runs over `seen`."""
    g, n = log_decay[seen], seen.index(t)
    past = g[1 : n + 1].flip(0).cumsum(0).flip(0)
    return torch.cat([past, torch.zeros_like(g[:1]), g[n:-1].cumsum(0)])


def read_rows(
    log_scores, v, beta, causal, key_mask, segment_ids, normalize=True, free_values=None, window=None, queries=None
) -> Read:
    """The read of every row t under log_scores(b, t, seen), (len(seen), H, d_v or 1), over its document's tokens.

    queries: how many rows, the last of the tokens, read; None: those of all tokens, of which masked ones read 0.
    """
    batch, time = v.shape[:2]
    beta = None if beta is None else beta.double()
    f = v if free_values is None else free_values.double()
    rows = []
    for b in range(batch):
        keep = [True] * time if key_mask is None else key_mask[b].bool().tolist()
        sees = supports(keep, None if segment_ids is None else segment_ids[b].tolist(), causal, window)
        for t in range(time - (queries or time), time):
            seen = [i for i in range(time) if sees(t, i)] if queries or keep[t] else []
            nothing = v[b, :0].sum(0), f[b, :0].sum(0)
            row = _read_row(log_scores(b, t, seen), v[b, seen], f[b, seen], beta, normalize) if seen else nothing
            rows.append(row)
    mean, free_energy = (torch.stack(parts).unflatten(0, (batch, -1)) for parts in zip(*rows))
    return Read(mean, None if beta is None else free_energy)


def supports(keep: list[bool], ids: list[int] | None, causal: bool, window: int | None) -> Callable[[int, int], bool]:
    """Whether token t sees token i. A masked token belongs to the document of the kept one before it."""
    document, last, number = [], None, 0
    for i, kept in enumerate(keep):
        if kept:
            if ids is not None and last is not None and ids[i] != last:
                number += 1
            last = None if ids is None else ids[i]
        document.append(number)

    def sees(t: int, i: int) -> bool:
        together = ids is None or document[i] == document[t]
        near = window is None or abs(t - i) < window
        return keep[i] and (i <= t or not causal) and together and near

    return sees


def _read_row(s: Tensor, v: Tensor, f: Tensor, beta: Tensor | None, normalize: bool) -> tuple[Tensor, Tensor]:
    """Mean of v and free energy of f (i, H, d_v) under the weights e^s, s (i, H, d_v or 1)."""
    empty = torch.isneginf(s.detach()).all(0)
    s = s.masked_fill(empty, 0.0)
    log_p = s - s.logsumexp(0) if normalize else s
    mean = (log_p.exp() * v).sum(0).masked_fill(empty, 0.0)
    if beta is None:
        return mean, torch.zeros_like(f[0])
    return mean, ((log_p + beta * f).logsumexp(0) / beta).masked_fill(empty, 0.0)
