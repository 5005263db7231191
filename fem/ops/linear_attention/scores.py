"""Scores of the pairs of tokens inside one chunk, by segment sums: no decay is ever divided by.

    A_ti = sum_c q_tc exp(sum_{i<r<=t} g_rc) k_ic        for i <= t, or i < t without the present token

The decay g is shared by the key channels, (y, c, 1), or their own, (y, c, dk), or None. y counts chunks, c tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from fem.ops.common.read import LOG_ZERO, log

GROUP = 2**16  # numbers at a time, so that they stay in the CPU's cache

Decay = Float[Tensor, "y c dk"] | Float[Tensor, "y c 1"]
Pairs = Float[Tensor, "y c c"]


def since_start(g: Decay) -> Decay:
    """sum_{r <= t} g_r: how much of what came before the chunk is left at t, as a logarithm."""
    return g.cumsum(1)


def since_start_backward(grad: Decay) -> Decay:
    return grad.flip(1).cumsum(1).flip(1)


def until_end(g: Decay) -> Decay:
    """sum_{r > i} g_r: how much of token i is left at the end of the chunk, as a logarithm."""
    return F.pad(g[:, 1:], (0, 0, 0, 1)).flip(1).cumsum(1).flip(1)


def until_end_backward(grad: Decay) -> Decay:
    return F.pad(grad[:, :-1], (0, 0, 1, 0)).cumsum(1)


def segments(g: Float[Tensor, "y c *d"]) -> Float[Tensor, "y c c *d"]:
    """sum_{i<r<=t} g_r at (t, i), 0 for i >= t."""
    later = torch.ones(g.shape[1], g.shape[1], dtype=torch.bool, device=g.device).tril(-1)
    later = later.view(later.shape + (1,) * (g.ndim - 2))
    return torch.where(later, g.unsqueeze(2), 0).cumsum(1)


def pair_scores(q: Tensor, k: Tensor, g: Decay | None, present: bool) -> Pairs:
    """A: by one matrix product where all key channels decay alike, else one distance t - i at a time."""
    if g is not None and g.shape[-1] > 1:
        return torch.cat([_lagged_scores(*part, present) for part in _groups(q, k, g)])
    return (q @ k.mT) * _decay_of_pairs(q, g, present)


def pair_scores_backward(
    grad: Pairs, q: Tensor, k: Tensor, g: Decay | None, present: bool
) -> tuple[Tensor, Tensor, Decay | None]:
    """Gradients of q, k and g."""
    if g is not None and g.shape[-1] > 1:
        parts = [_lagged_scores_backward(*part, present) for part in _groups(grad, q, k, g)]
        return tuple(torch.cat(part) for part in zip(*parts))
    direct = grad * _decay_of_pairs(q, g, present)
    d_g = None if g is None else _across(direct * (q @ k.mT))
    return direct @ k, direct.mT @ q, d_g


def _decay_of_pairs(q: Tensor, g: Decay | None, present: bool) -> Tensor:
    decay = q.new_ones(q.shape[1], q.shape[1]) if g is None else segments(g.squeeze(-1)).exp()
    return decay.tril(0 if present else -1)


def _across(pairs: Pairs) -> Decay:
    """Sum over the pairs i < r <= t, for each r."""
    before = pairs.cumsum(2)[:, :, :-1].tril(-1).sum(1)
    return F.pad(before, (1, 0)).unsqueeze(-1)


def log_pair_scores(q: Tensor, k: Tensor, g: Decay | None, present: bool) -> Pairs:
    """log A, exact also where the scores themselves would underflow."""
    forbidden = ~torch.ones(q.shape[1], q.shape[1], dtype=torch.bool, device=q.device).tril(0 if present else -1)
    scores = log(q).unsqueeze(2) + log(k).unsqueeze(1)
    scores = scores if g is None else scores + segments(g)
    return scores.logsumexp(-1).masked_fill(forbidden, LOG_ZERO)


def _groups(*tensors: Tensor):
    size = max(1, GROUP // tensors[-1][0].numel())
    return zip(*(tensor.split(size) for tensor in tensors))


def _decays_by_lag(g: Tensor):
    """For each lag, what is left at t of token t - lag, for t = lag, lag + 1, ..."""
    step = g.exp()
    left = torch.ones_like(g)
    yield left
    for lag in range(1, g.shape[1]):
        left = left[:, 1:] * step[:, 1 : g.shape[1] - lag + 1]
        yield left


def _lagged_scores(q: Tensor, k: Tensor, g: Tensor, present: bool) -> Pairs:
    time = g.shape[1]
    by_lag = (torch.linalg.vecdot(q[:, lag:] * left, k[:, : time - lag]) for lag, left in enumerate(_decays_by_lag(g)))
    by_lag = torch.stack([F.pad(pair, (lag, 0)) for lag, pair in enumerate(by_lag)], 2)  # (y, t, lag)
    index = torch.arange(time, device=g.device)
    lag = (index[:, None] - index).clamp(min=0).expand(len(q), -1, -1)
    return by_lag.gather(2, lag).tril(0 if present else -1)


def _lagged_scores_backward(
    grad: Pairs, q: Tensor, k: Tensor, g: Tensor, present: bool
) -> tuple[Tensor, Tensor, Tensor]:
    time = g.shape[1]
    d_q, d_k, d_g = (torch.zeros_like(x) for x in (q, k, g))
    straddling = torch.zeros_like(g)  # at t: the sum over the pairs (t, i) of at least the lag at hand
    for lag, left in reversed(list(enumerate(_decays_by_lag(g)))):
        if lag or present:
            weight = left * grad.diagonal(-lag, 1, 2).unsqueeze(-1)
            from_key = weight * k[:, : time - lag]
            d_q[:, lag:] += from_key
            d_k[:, : time - lag] += weight * q[:, lag:]
            if lag:
                straddling[:, lag:] += from_key * q[:, lag:]
                d_g[:, 1 : time - lag + 1] += straddling[:, lag:]
    return d_q, d_k, d_g
