"""Which inverse temperature a read stands for: of an interpolated read (Eq. 8), of a budget in nats (Theorem 2.8)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from fem.theory.rows import Along, PerRead, as_given, prepare, shown


@torch.no_grad()
def hidden_temperature(p: Along, v: Along, lam: PerRead, beta_max: PerRead, dim: int = -1) -> Along:
    """The inverse temperature in [0, beta_max] that the interpolated read stands for.

        F(beta*) = (1 - lam) mean + lam F(beta_max)                                             (Eq. 8, Prop. F.2)

    lam in [0, 1]; lam = 0 gives 0, lam = 1 gives beta_max. Values constant on the support admit every beta: lam
    beta_max is returned. Carries no gradient; d beta*/d lam = (F(beta_max) - mean) / F'(beta*)  (Corollary F.3).
    Raises ValueError if lam leaves [0, 1] or beta_max is negative, infinite or NaN.
    """
    rows, lam, beta_max = prepare(p, v, dim, lam=lam, beta_max=beta_max)
    if beta_max.isinf().any():
        raise ValueError(f"beta_max must be finite, got {shown(beta_max)}; use a large number for hard selection.")
    target = lam * rows.gain(beta_max)
    open_ended = lam * beta_max + torch.zeros_like(target)
    inside = (lam > 0) & (lam < 1) & (target > 0)
    found = _root(lambda beta: (rows.gain(beta), rows.slope(beta)), target, inside * beta_max)
    return as_given(torch.where(inside, found, open_ended), p, v)


@torch.no_grad()
def temperature_for_budget(p: Along, v: Along, kl: PerRead, dim: int = -1) -> Along:
    """The inverse temperature whose posterior spends the whole budget: it solves the constrained problem.

        max E_q[v]  subject to  KL(q || p) <= kl    is reached by q(beta*)  with  KL(q(beta*) || p) = kl
                                                                          (Eq. 3, Theorem 2.8 and Lemma E.1, corrected)

    Infinite when the budget pays for hard selection, kl >= -log p(tokens of the largest value); values constant on
    the support are that case for any budget. The optimum is E_q[v] = F(beta*) + kl / beta*, not F(beta*).
    Carries no gradient. Raises ValueError on a negative or NaN kl.
    """
    rows, kl = prepare(p, v, dim, kl=kl)
    peak = rows.peak()
    limit = torch.where(peak.mass < 0.5, -peak.mass.log(), -torch.log1p(-peak.rest))
    hard = (kl >= limit) | (peak.margin == 0)
    inside = ~hard & (kl > 0)
    decided = 800 / peak.margin  # there all other tokens have a posterior below e^-800 / p: hard selection in float64

    def spent(beta: Tensor) -> tuple[Tensor, Tensor]:
        q = rows.posterior(beta)
        away = rows.centred - (q * rows.centred).sum(-1, keepdim=True)
        return rows.kl_from_prior(beta), beta * (q * away.square()).sum(-1)

    found = _root(spent, kl + torch.zeros_like(peak.mass), torch.where(inside, decided, 0))
    return as_given(torch.where(hard, math.inf, found), p, v)


def _root(function: Callable[[Tensor], tuple[Tensor, Tensor]], target: Tensor, high: Tensor) -> Tensor:
    """Where an increasing function of known slope reaches target on [0, high]: Newton, bisecting when it is slow."""
    low, high = torch.zeros_like(target), high + torch.zeros_like(target)
    x, step = high / 2, high
    for _ in range(300):
        value, slope = function(x)
        low, high = torch.where(value < target, x, low), torch.where(value < target, high, x)
        newton = (target - value) / slope
        usable = (x + newton > low) & (x + newton < high) & (2 * newton.abs() <= step.abs())
        step = torch.where(usable, newton, (low + high) / 2 - x)
        settled = (
            ((value - target).abs() <= 2e-15 * target) | (newton.abs() <= 1e-15 * x) | (high - low <= 4e-16 * high)
        )
        if settled.all():
            break
        x = torch.where(settled, x, x + step)
    return x
