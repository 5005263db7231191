"""Reads row by row in float64, from the logarithms of the weights: what the recurrent definitions share."""

from __future__ import annotations

import torch
from torch import Tensor

from fem.ops.common.read import Read


def decayed(log_decay: Tensor, t: int, seen: list[int]):
    """The tokens of `seen` with the decay between each and t."""
    zero = torch.zeros_like(log_decay[t])
    for i in seen:
        between = [r for r in seen if (i < r <= t) or (t <= r < i)]
        yield i, sum((log_decay[r] for r in between), zero)


def read_rows(log_scores, v, beta, causal, key_mask, segment_ids, normalize) -> Read:
    """The read of every row t from log_scores(b, t, seen), (len(seen), H, d_v), over the tokens of its document."""
    batch, time = v.shape[:2]
    beta = None if beta is None else beta.double()
    nothing = torch.zeros_like(v[0, 0])
    rows = []
    for b in range(batch):
        document, last = [], None
        for t in range(time):
            if key_mask is not None and not key_mask[b, t]:
                rows.append((nothing, nothing))
                continue
            same = segment_ids is None or last is None or segment_ids[b, t] == segment_ids[b, last]
            document, last = ([*document, t] if same else [t]), t
            seen = document if causal else _whole_document(b, t, time, key_mask, segment_ids)
            rows.append(weighted_read(log_scores(b, t, seen), v[b, seen], v[b, seen], beta, normalize))
    mean, free_energy = (torch.stack(parts).unflatten(0, (batch, time)) for parts in zip(*rows))
    return Read(mean, None if beta is None else free_energy)


def _whole_document(b, t, time, key_mask, segment_ids) -> list[int]:
    kept = [i for i in range(time) if key_mask is None or key_mask[b, i]]
    here = kept.index(t)
    first = last = here
    same = lambda i, j: segment_ids is None or segment_ids[b, kept[i]] == segment_ids[b, kept[j]]  # noqa: E731
    while first > 0 and same(first, first - 1):
        first -= 1
    while last + 1 < len(kept) and same(last, last + 1):
        last += 1
    return kept[first : last + 1]


def weighted_read(
    s: Tensor, means: Tensor, energies: Tensor, beta: Tensor | None, normalize: bool
) -> tuple[Tensor, Tensor]:
    """Mean and free energy of items (i, h, dv) under the weights e^s, s (i, h, dv or 1).

    Of a token both are its value; of items that are themselves reads, their means and their free energies.
    """
    empty = torch.isneginf(s.detach()).all(0)
    s = s.masked_fill(empty, 0.0)
    log_p = s - s.logsumexp(0) if normalize else s
    mean = (log_p.exp() * means).sum(0).masked_fill(empty, 0.0)
    if beta is None:
        return mean, mean
    return mean, ((log_p + beta * energies).logsumexp(0) / beta).masked_fill(empty, 0.0)
