"""The inverse temperature that an interpolated read stands for (Eq. 8)."""

from __future__ import annotations

import torch

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
    anywhere = lam * beta_max + torch.zeros_like(target)
    inside = (lam > 0) & (lam < 1) & (target > 0)
    low, high = torch.zeros_like(target), inside * beta_max + torch.zeros_like(target)
    for _ in range(1100):  # halvings from the largest to the smallest number of float64, at most
        if (high - low <= 4e-16 * high).all():  # two units in the last place
            break
        middle = (low + high) / 2
        below = rows.gain(middle) < target
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return as_given(torch.where(inside, high, anywhere), p, v)
