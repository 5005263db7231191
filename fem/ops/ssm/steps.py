"""The scan behind `ssm_read` token by token, in steps that PyTorch can differentiate any number of times."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fem.ops.common.read import LOG_ZERO, NO_WEIGHT, log_average
from fem.ops.common.scaled_sums import add_token
from fem.ops.common.steps import along_time


def step_by_step(delta, a, b, c, skip, v, beta, opens, log_delta, log_b, log_c, *start) -> list[Tensor]:
    """The reads and the last states, by steps that PyTorch can differentiate any number of times."""
    rank, channels = a.shape
    log_delta, log_b, log_c = (_log(delta), _log(b), _log(c)) if log_delta is None else (log_delta, log_b, log_c)
    log_skip = None if skip is None else _log(skip)

    def step(before, delta, v, opens, log_delta, log_b, log_c):
        peak, *memory = before
        decay = delta.unsqueeze(-2) * a
        decay = decay if opens is None else decay.masked_fill(opens[:, None, None], -math.inf)
        value = v.unsqueeze(-2).expand_as(decay)
        left = (peak + decay).clamp(min=LOG_ZERO)
        log_input = log_delta.unsqueeze(-2) + log_b.unsqueeze(-1)
        after = add_token(left, *memory, x=log_input, v=value, beta=beta)
        seen_peak, seen_sums, *seen_energy = [left, *memory] if skip is None else after
        scores = seen_peak + seen_sums[0].log() + log_c.unsqueeze(-1)
        items = [seen_sums[1] / seen_sums[0], *seen_energy]
        if skip is not None:
            scores = torch.cat([scores, log_skip.expand_as(scores[:, :1])], 1)
            items = [torch.cat([item, value[:, :1]], 1) for item in items]
        return after, _read_items(scores.clamp(min=LOG_ZERO), items, beta)

    states = [part.unflatten(-1, (rank, channels)) for part in start]
    last, reads = along_time(step, states, delta, v, opens, log_delta, log_b, log_c)
    return [*reads, *(part.flatten(-2) for part in last)]


def _log(x: Tensor) -> Tensor:
    """log x; at 0 without gradient, where it would be infinite."""
    positive = x > 0
    return torch.where(positive, torch.where(positive, x, 1).log(), -math.inf)


def _read_items(scores: Tensor, items: list[Tensor], beta: Tensor | None) -> list[Tensor]:
    """Log-weight, mean and free energy of items (B, n, D) with the logarithms of weights `scores`."""
    total = scores.logsumexp(1, keepdim=True)
    log_p = scores - total
    read = [total, (log_p.exp() * items[0]).sum(1, keepdim=True)]
    if beta is not None:
        read.append(log_average(log_p, beta * items[1], 1) / beta)
    empty = total < NO_WEIGHT
    return [total.squeeze(1), *(torch.where(empty, 0, part).squeeze(1) for part in read[1:])]
