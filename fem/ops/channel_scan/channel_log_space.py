"""The channel scan by merging what stretches of tokens read, in logarithms: exact at any magnitude.

It reads what is in doubt, generation on a CPU, `torch.export`, `torch.func` and second derivatives.

A stretch is the read of its tokens, and the decay through it. Every token's prefix is found in log2 T rounds, each of
which merges stretches with those before them; one token more is one merge.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fem.ops.common.launch import by_kernels
from fem.ops.common.read import LOG_ZERO, NO_WEIGHT, Terms, beside, merge


def channel_by_prefixes(
    memory: Terms, x: Tensor, a: Tensor | None, v: Tensor, f: Tensor, beta: Tensor
) -> tuple[Terms, Terms]:
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
    read = _zero_unseen(Terms(*(part[:, 1:] for part in terms)))
    return read, Terms(*(part[:, -1:] for part in read))


def cell_step(memory: Terms, x: Tensor, a: Tensor | None, v: Tensor, f: Tensor, beta: Tensor) -> Terms:
    """What one token more reads, which is all that there is to remember."""
    return _zero_unseen(merge(memory if a is None else _fallen(memory, a), Terms(x, v, f), beta))


def channel_step(memory: Terms, *inputs: Tensor | None) -> tuple[Terms, Terms]:
    """What one token reads, (B, 1, C), and the memory after it."""
    step = cell_step
    if by_kernels(*inputs, *memory):
        from fem.ops.channel_scan.channel_token import channel_token  # by Triton, which the library does not require

        step = channel_token
    after = step(memory, *inputs)
    return after, after


def _fallen(terms: Terms, a: Tensor) -> Terms:
    return terms._replace(log_weight=terms.log_weight + a)


def _zero_unseen(terms: Terms) -> Terms:
    """The terms, 0 where there is no weight."""
    log_weight = terms.log_weight.clamp_min(LOG_ZERO)
    seen = log_weight > NO_WEIGHT
    return Terms(log_weight, *(torch.where(beside(seen, part), part, 0) for part in terms[1:]))
