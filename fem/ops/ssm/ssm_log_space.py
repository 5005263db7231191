"""A state space model's N states as cells that each keep a read, in logarithms: exact at any magnitude.

It reads what is in doubt, generation on a CPU, `torch.export`, `torch.func` and second derivatives.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fem.ops.channel_scan.channel_log_space import cell_step, channel_by_prefixes
from fem.ops.common.launch import by_kernels
from fem.ops.common.read import LOG_ZERO, NO_WEIGHT, Terms, beside, log, log_average


def ssm_by_prefixes(
    memory: Terms, delta, b, c, log_delta, log_b, log_c, opens, v, f, a, skip, beta
) -> tuple[Terms, Terms]:
    """What every token reads, (B, T, D), and the memory after the last, (B, N, D): cells are channels, side by side."""
    x, decay, log_c = _weights(delta, b, c, log_delta, log_b, log_c, opens, a)
    rank, side = len(a), lambda part: part.flatten(-2)
    values = [side(part.unsqueeze(-2).expand(*part.shape[:-1], rank, -1)) for part in (v, f)]
    start = Terms(*(side(part).unsqueeze(1) for part in memory))
    cells, after = channel_by_prefixes(start, side(x), side(decay), *values, beta.repeat(rank))
    if skip is None:  # a token sees what stood before it
        cells = Terms(*(torch.cat([first, part[:, :-1]], 1) for first, part in zip(start, cells)))
        cells = cells._replace(log_weight=cells.log_weight + side(decay))
    apart = lambda part: part.unflatten(-1, (rank, part.shape[-1] // rank))  # noqa: E731
    read = _read_over_cells(Terms(*map(apart, cells)), log_c, v, f, skip, beta)
    return read, Terms(*(apart(part).squeeze(1) for part in after))


def ssm_step(memory: Terms, delta, b, c, log_delta, log_b, log_c, opens, v, f, a, skip, beta) -> tuple[Terms, Terms]:
    """What one token reads, (B, 1, D), and the memory after it."""
    inputs = delta, b, c, log_delta, log_b, log_c, opens, v, f, a, skip, beta
    if skip is not None and by_kernels(*(x for x in inputs if x is not opens), *memory):
        from fem.ops.ssm.ssm_token import ssm_token  # by Triton, which the library does not require

        return ssm_token(memory, *inputs)
    x, decay, log_c = _weights(delta, b, c, log_delta, log_b, log_c, opens, a)
    after = cell_step(memory, x.squeeze(1), decay.squeeze(1), v, f, beta)
    seen = memory._replace(log_weight=memory.log_weight + decay.squeeze(1)) if skip is None else after
    return _read_over_cells(Terms(*(part.unsqueeze(1) for part in seen)), log_c, v, f, skip, beta), after


def _weights(delta, b, c, log_delta, log_b, log_c, opens, a) -> tuple[Tensor, Tensor, Tensor]:
    """The log-weight with which a token enters each cell, (.., N, D), the decay into it, and log c, (.., N, 1)."""
    if log_delta is None:
        log_delta, log_b, log_c = log(delta), log(b), log(c)
    decay = delta.unsqueeze(-2) * a
    if opens is not None:
        decay = torch.where(opens[..., None, None], LOG_ZERO, decay)
    x = log_delta.unsqueeze(-2) + log_b.unsqueeze(-1)
    return x.clamp_min(LOG_ZERO), decay, log_c.unsqueeze(-1).clamp_min(LOG_ZERO)


def _read_over_cells(cells: Terms, log_c: Tensor, v: Tensor, f: Tensor, skip: Tensor | None, beta: Tensor) -> Terms:
    """The read over the cells, weighted c, and through the skip over the token itself once more."""
    scores, *items = cells._replace(log_weight=cells.log_weight + log_c)
    if skip is not None:
        scores = torch.cat([scores, log(skip).expand_as(scores[..., :1, :])], -2)
        items = [torch.cat([item, own.unsqueeze(-2)], -2) for item, own in zip(items, (v, f))]
    scores = scores.clamp_min(LOG_ZERO)
    total = scores.logsumexp(-2, keepdim=True)
    seen = total > NO_WEIGHT
    log_p = torch.where(seen, scores - total, LOG_ZERO)  # rows that see nothing have no p that sums to 1
    mean, free_energy = items
    mean = (beside(log_p, mean).exp() * mean).sum(-2, keepdim=True)
    free_energy = log_average(beside(log_p, free_energy), beta * free_energy, -2) / beta
    read = [torch.where(beside(seen, part), part, 0) for part in (mean, free_energy)]
    return Terms(*(part.squeeze(-2) for part in (torch.where(seen, total, LOG_ZERO), *read)))
