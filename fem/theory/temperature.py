"""The inverse temperature of an interpolated read (Eq. 8) and of a budget in nats (Theorem 2.8)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from fem.theory.rows import Along, PerRead, as_given, checked_rows, shown


@torch.no_grad()
def hidden_temperature(p: Along, v: Along, lam: PerRead, beta_max: PerRead, dim: int = -1) -> Along:
    """The inverse temperature in [0, beta_max] that the interpolated read stands for.

        F(beta*) = (1 - lam) mean + lam F(beta_max)                                             (Eq. 8, Prop. F.2)

    lam in [0, 1]; lam = 0 gives 0, lam = 1 gives beta_max. Values constant on the support admit every beta: lam
    beta_max is returned. Carries no gradient; d beta*/d lam = (F(beta_max) - mean) / F'(beta*)  (Corollary F.3).
    Raises ValueError if lam leaves [0, 1] or beta_max is negative, infinite or NaN.
    """
    rows, lam, beta_max = checked_rows(p, v, dim, lam=lam, beta_max=beta_max)
    if beta_max.isinf().any():
        raise ValueError(f"beta_max must be finite, got {shown(beta_max)}; use a large number for hard selection.")
    target = lam * rows.gain(beta_max)
    anywhere = lam * beta_max + 0 * target  # NaN where a value is
    inside = (lam > 0) & (lam < 1) & (target > 0)
    root = _root(rows.gain, target, inside * beta_max)
    return as_given(torch.where(inside, root, anywhere), p, v)


@torch.no_grad()
def temperature_for_budget(p: Along, v: Along, kl: PerRead, dim: int = -1) -> Along:
    """The inverse temperature whose posterior spends the whole budget, which solves the constrained problem.

        max E_q[v]  subject to  KL(q || p) <= kl    is reached by q(beta*)  with  KL(q(beta*) || p) = kl
                                                                          (Eq. 3, Theorem 2.8 and Lemma E.1, corrected)

    Infinite when the budget pays for hard selection, kl >= -log p(tokens of the largest value); values constant on
    the support are that case for any budget. The optimum is E_q[v] = F(beta*) + kl / beta*, not F(beta*).
    Carries no gradient. Raises ValueError on a negative or NaN kl.
    """
    rows, kl = checked_rows(p, v, dim, kl=kl)
    values = torch.where(rows.p > 0, rows.centred, -math.inf)
    best = values == values.amax(-1, keepdim=True)
    best_share, rest = (rows.p * best).sum(-1), (rows.p * ~best).sum(-1)
    limit = torch.where(best_share < 0.5, -best_share.log(), -torch.log1p(-rest))
    margin = values.amax(-1) - torch.where(best, -math.inf, values).amax(-1)
    hard = (kl >= limit) | ~(margin < math.inf)
    decided = 800 / margin  # there all other tokens have a posterior below e^-800 / p: hard selection in float64
    root = _root(rows.kl_from_prior, kl + torch.zeros_like(margin), torch.where(hard, 0, decided))
    return as_given(torch.where(hard, math.inf, root) + 0 * rows.mean, p, v)


def _root(function: Callable[[Tensor], Tensor], target: Tensor, high: Tensor) -> Tensor:
    """Where an increasing function reaches target on [0, high], by bisection."""
    low, high = torch.zeros_like(target), high + torch.zeros_like(target)
    for _ in range(1100):  # halvings from the largest to the smallest number of float64, at most
        if (high - low <= 4e-16 * high).all():  # two units in the last place
            break
        middle = (low + high) / 2
        below = function(middle) < target
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return high
