"""The free energy by its definition: value, posterior, gain over the mean, weights of the interpolated read, and the
share of channels that read the right token."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fem.theory.rows import Along, PerRead, as_given, check_tensors, checked_rows, shown


def free_energy(p: Along, v: Along, beta: PerRead, dim: int = -1) -> Along:
    """Free energy of the values under the prior; beta = 0 is the mean, beta = inf the largest value of the support.

        F(beta) = (1 / beta) log sum_i p_i exp(beta v_i) = mean + KL(p || q) / beta                (Eq. 4, Eq. 6)

    Raises ValueError on a negative or NaN p or beta, on p that does not sum to 1 along dim (or to 0: no support), and
    on shapes that do not broadcast; TypeError unless p and v are floating-point tensors.
    """
    rows, beta = checked_rows(p, v, dim, beta=beta)
    return as_given(rows.mean + rows.gain(beta), p, v)


def posterior(p: Along, v: Along, beta: PerRead, dim: int = -1) -> Along:
    """The prior tilted towards large values; beta = 0 is p itself.

        q_i = p_i exp(beta v_i) / sum_r p_r exp(beta v_r) = dF / dv_i                               (Eq. 5, Prop. E.4)

    Tokens stand along `dim`, as in p and v.
    """
    rows, beta = checked_rows(p, v, dim, beta=beta)
    return as_given(rows.posterior(beta), p, v, dim)


def kl_gap(p: Along, v: Along, beta: PerRead, dim: int = -1) -> Along:
    """Gain of the free energy over the mean, in nats.

        KL(p || q) = beta (F(beta) - mean)                                                   (Eq. 6, Eq. 19, Eq. 25)

    Never negative; infinite at beta = inf unless v is constant on the support.
    """
    rows, beta = checked_rows(p, v, dim, beta=beta)
    z = rows.exponents(beta)
    unbounded = beta.isinf() & (z != 0).any(-1)
    return as_given(torch.where(unbounded, math.inf, rows.kl_gap(beta)), p, v)


def posterior_mean(p: Along, v: Along, beta: PerRead, dim: int = -1) -> Along:
    """The value expected under the posterior, the second readout of Section 2.3.

        sum_i q_i v_i = F(beta) + KL(q || p) / beta >= F(beta)

    It nears the largest value exponentially in beta, where F does so only like 1 / beta.
    """
    rows, beta = checked_rows(p, v, dim, beta=beta)
    return as_given(rows.mean + (rows.posterior(beta) * rows.centred).sum(-1), p, v)


def effective_weights(p: Along, v: Along, lam: PerRead, beta_max: PerRead, dim: int = -1) -> Along:
    """Weight of each token in the interpolated read u = (1 - lam) mean + lam F(beta_max), that is du/dv.

        w_i = (1 - lam) p_i + lam q_i(beta_max)                                                   (Appendix M.1)

    Their average of v, (1 - lam) mean + lam E_q[v], is not u. lam in [0, 1].
    """
    rows, lam, beta_max = checked_rows(p, v, dim, lam=lam, beta_max=beta_max)
    lam = lam[..., None]
    return as_given((1 - lam) * rows.p + lam * rows.posterior(beta_max), p, v, dim)


def index_accuracy(
    prediction: Float[Tensor, "..."], values: Float[Tensor, "... t d"], winner: Int[Tensor, "..."]
) -> Float[Tensor, ""]:
    """Share of the channels, over the whole batch, whose prediction lies nearest to the winning token's value.

        a_j = argmin_i (v_ij - y_j)^2        accuracy = mean of [a_j = winner_j]                        (Appendix P)

    prediction (.., D), values (.., T, D), winner (.., D): the index of a token. Ties count as the winner's. Raises
    ValueError on mismatched shapes and on indices out of range, TypeError on other dtypes.
    """
    check_tensors(prediction=prediction, values=values)
    if values.ndim < 2 or values.shape[-2] == 0:
        raise ValueError(f"values must have shape (.., T >= 1, D), got {tuple(values.shape)}.")
    if not isinstance(winner, Tensor) or winner.is_floating_point() or winner.dtype == torch.bool:
        raise TypeError("winner must be a tensor of integers, the winning token of each channel.")
    wanted = (*values.shape[:-2], values.shape[-1])
    if tuple(prediction.shape) != wanted or tuple(winner.shape) != wanted:
        raise ValueError(
            f"prediction and winner must have the shape (.., D) of values (.., T, D), here {wanted}; "
            f"got {tuple(prediction.shape)} and {tuple(winner.shape)}."
        )
    if winner.device.type == "cpu" and not ((winner >= 0) & (winner < values.shape[-2])).all():
        raise ValueError(f"winner must name tokens from 0 to {values.shape[-2] - 1}, got {shown(winner)}.")
    distance = (values - prediction[..., None, :]).abs()
    return (distance.gather(-2, winner.long()[..., None, :])[..., 0, :] <= distance.amin(-2)).float().mean()
