"""A state space model token by token, in logarithms: its numbers, what a scan reads, and one step or many of it."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from fem.ops.common.cells import by_prefixes, cell_step, read_over_cells
from fem.ops.common.precision import upcast
from fem.ops.common.read import LOG_ZERO, Terms, log


class SsmInputs(NamedTuple):
    """What the scan of a state space model reads, heads side by side: D channels of N states."""

    delta: Float[Tensor, "b t d"]
    log_delta: Float[Tensor, "b t d"]  # that of the weights: a token may decay what was before and weigh nothing
    log_b: Float[Tensor, "b t n"]
    log_c: Float[Tensor, "b t n"]
    opens: Bool[Tensor, "b t"] | None  # where a document begins
    v: Float[Tensor, "b t dv"]
    f: Float[Tensor, "b t df"]
    a: Float[Tensor, "n d"]
    skip: Float[Tensor, " d"]
    beta: Float[Tensor, " df"]


def plain_numbers(delta, a, b, c, d) -> tuple[tuple[Tensor, ...], tuple[Tensor, Tensor, Tensor]]:
    """`ssm_numbers` by torch's own operations."""
    logits = upcast(delta), upcast(torch.cat([b, c], -1))  # of which every launch is one for both
    delta, both = numbers = [F.softplus(x) for x in logits]
    log_delta, log_both = map(_log_softplus, logits, numbers)
    a, d = F.softplus(upcast(a)), F.softplus(upcast(d))
    return (delta, -a, *both.chunk(2, -1), d), (log_delta, *log_both.chunk(2, -1))


def _log_softplus(x: Tensor, softplus: Tensor) -> Tensor:
    """log softplus(x); below x = -30 that is x itself, to within 5e-14."""
    return torch.where(x < -30, x, softplus.clamp(min=1e-14).log())


def ssm_by_prefixes(memory: Terms, x: SsmInputs) -> tuple[Terms, Terms]:
    """What every token reads, (B, T, D), and the memory after the last, (B, N, D): cells are states, side by side."""
    weight, decay, rank = *_weights(x), len(x.a)
    side = lambda part: part.flatten(-2)  # noqa: E731
    values = [side(part.unsqueeze(-2).expand(*part.shape[:-1], rank, -1)) for part in (x.v, x.f)]
    start = Terms(*(side(part).unsqueeze(1) for part in memory))
    cells, after = by_prefixes(start, side(weight), side(decay), *values, x.beta.repeat(rank))
    apart = lambda part: part.unflatten(-1, (rank, part.shape[-1] // rank))  # noqa: E731
    return _read(Terms(*map(apart, cells)), x), Terms(*(apart(part).squeeze(1) for part in after))


def ssm_step(memory: Terms, x: SsmInputs) -> tuple[Terms, Terms]:
    """What one token reads, (B, 1, D), and the memory after it."""
    weight, decay = (part.squeeze(1) for part in _weights(x))
    after = cell_step(memory, weight, decay, x.v, x.f, x.beta)
    return _read(Terms(*(part.unsqueeze(1) for part in after)), x), after


def _weights(x: SsmInputs) -> tuple[Tensor, Tensor]:
    """The log-weight with which a token enters each cell, (B, T, N, D), and the decay into it."""
    decay = x.delta.unsqueeze(-2) * x.a
    if x.opens is not None:
        decay = torch.where(x.opens[..., None, None], LOG_ZERO, decay)
    return (x.log_delta.unsqueeze(-2) + x.log_b.unsqueeze(-1)).clamp_min(LOG_ZERO), decay


def _read(cells: Terms, x: SsmInputs) -> Terms:
    """The read over the cells, weighted c, and through the skip over the token itself once more."""
    scores = cells.log_weight + x.log_c.unsqueeze(-1).clamp_min(LOG_ZERO)
    scores = torch.cat([scores, log(x.skip).expand_as(scores[..., :1, :])], -2).clamp_min(LOG_ZERO)
    items = (torch.cat([item, own.unsqueeze(-2)], -2) for item, own in zip(cells[1:], (x.v, x.f)))
    return Terms(*(part.squeeze(-2) for part in read_over_cells(scores, *items, x.beta)))
