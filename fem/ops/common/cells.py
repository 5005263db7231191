"""A memory of cells that each keep a read, in logarithms: exact at any magnitude, by steps that PyTorch can transform.

Every scan has it: a cell is a channel, or a key channel of linear attention, or a state of a channel. It reads what is
in doubt, generation on a CPU, `torch.export`, `torch.func` and second derivatives.

A stretch of tokens is the read of these, and the decay through it. Every token's prefix is found in log2 T rounds, each
of which merges stretches with those before them; one token more is one merge.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fem.ops.common.read import LOG_ZERO, NO_WEIGHT, Terms, beside, log_average, merge


def cell_step(memory: Terms, x: Tensor, a: Tensor | None, v: Tensor, f: Tensor, beta: Tensor) -> Terms:
    """The memory after one token more, of log-weight x, into which what was before decays by a; None: it does not."""
    after = merge(memory if a is None else _fallen(memory, a), Terms(x, v, f), beta)
    return after._replace(log_weight=after.log_weight.clamp_min(LOG_ZERO))


def by_prefixes(memory: Terms, x: Tensor, a: Tensor | None, v: Tensor, f: Tensor, beta: Tensor) -> tuple[Terms, Terms]:
    """The read after every token, (B, T, C), and the memory after the last, (B, 1, C)."""
    terms = Terms(*(torch.cat(pair, 1) for pair in zip(memory, (x, v, f))))
    fall = torch.zeros_like(terms.log_weight) if a is None else torch.cat([torch.zeros_like(a[:, :1]), a], 1)
    span = 1
    while span <= x.shape[1]:
        earlier, later = (Terms(*(part[:, cut] for part in terms)) for cut in (slice(-span), slice(span, None)))
        merged = merge(_fallen(earlier, fall[:, span:]), later, beta)
        terms = Terms(*(torch.cat([part[:, :span], new], 1) for part, new in zip(terms, merged)))
        fall = torch.cat([fall[:, :span], (fall[:, span:] + fall[:, :-span]).clamp_min(LOG_ZERO)], 1)
        span *= 2
    read = zero_unseen(Terms(*(part[:, 1:] for part in terms)))
    return read, Terms(*(part[:, -1:] for part in read))


def read_over_cells(scores: Tensor, mean: Tensor, free_energy: Tensor, beta: Tensor) -> Terms:
    """The read over cells along dimension -2, which is kept, each weighted e^scores."""
    total = scores.logsumexp(-2, keepdim=True)
    log_p = torch.where(total > NO_WEIGHT, scores - total, LOG_ZERO)  # of no weight there is no p that sums to 1
    mean = (beside(log_p, mean).exp() * mean).sum(-2, keepdim=True)
    free_energy = log_average(beside(log_p, free_energy), beta * free_energy, -2) / beta
    return zero_unseen(Terms(total, mean, free_energy))


def zero_unseen(terms: Terms) -> Terms:
    """The terms, 0 where there is no weight."""
    log_weight = terms.log_weight.clamp_min(LOG_ZERO)
    seen = log_weight > NO_WEIGHT
    return Terms(log_weight, *(torch.where(beside(seen, part), part, 0) for part in terms[1:]))


def _fallen(terms: Terms, a: Tensor) -> Terms:
    return terms._replace(log_weight=terms.log_weight + a)
