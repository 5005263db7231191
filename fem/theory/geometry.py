"""How the free energy answers to temperature, values and prior (Appendix E)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from fem.theory.rows import Along, PerRead, as_given, check_distribution, check_tensors, positive, prepare


def free_energy_slope(p: Along, v: Along, beta: PerRead, dim: int = -1) -> Along:
    """How fast the free energy grows with beta. It is KL(q || p) here, but KL(p || q) in `kl_gap`.

        dF / dbeta = KL(q || p) / beta^2 >= 0,    Var_p(v) / 2 at beta = 0                            (Eq. 20, Eq. 24)

    Zero only where v is constant on the support.
    """
    rows, beta = prepare(p, v, dim, beta=beta)
    return as_given(rows.slope(beta), p, v)


def small_beta_expansion(p: Along, v: Along, beta: PerRead, dim: int = -1) -> Along:
    """Where the free energy starts from: the first two cumulants of v under p.

        F(beta) = mean + beta / 2 Var_p(v) + O(beta^2)                                                        (Eq. 20)

    The remainder is at most beta^2 (max v - min v)^3 / 6 over the support.
    """
    rows, beta = prepare(p, v, dim, beta=beta)
    return as_given(rows.mean + beta * rows.variance() / 2, p, v)


def kl_divergence(q: Along, p: Along, dim: int = -1) -> Along:
    """Nats of information that turn the prior p into q.

        KL(q || p) = sum_i q_i log(q_i / p_i),    0 log 0 = 0

    Infinite where q leaves the support of p. Raises ValueError unless both sum to 1, TypeError on other dtypes.
    """
    check_tensors(q=q, p=p)
    for name, weights in (("q", q), ("p", p)):
        check_distribution(name, weights.movedim(dim, -1), torch.finfo(weights.dtype).eps)
    return (torch.xlogy(q, q) - torch.xlogy(q, p)).sum(dim)


def donsker_varadhan(q: Along, p: Along, v: Along, beta: PerRead, dim: int = -1) -> Along:
    """The utility that the free energy maximises, for any distribution q on the support of p.

        E_q[v] - KL(q || p) / beta <= F(beta),    with equality only at the posterior                         (Eq. 17)

    beta > 0; v must be finite on the support of q.
    """
    check_tensors(q=q, p=p, v=v)
    cost = kl_divergence(q, p, dim) / positive("beta", beta)
    return (q * torch.where(q > 0, v, 0)).sum(dim) - cost


def value_hessian(p: Along, v: Along, beta: PerRead, dim: int = -1) -> Float[Tensor, "... t t"]:
    """Curvature of the free energy in the values: a covariance, so F is convex in v.

        d^2 F / dv_i dv_r = beta (q_i [i = r] - q_i q_r),    largest eigenvalue <= beta / 2           (Eq. 21, Eq. 22)

    Both token axes stand last.
    """
    rows, beta = prepare(p, v, dim, beta=beta)
    q = rows.posterior(beta)
    return as_given(beta[..., None, None] * (q.diag_embed() - q[..., :, None] * q[..., None, :]), p, v)


def prior_gradient(p: Along, v: Along, beta: PerRead, dim: int = -1) -> Along:
    """How the free energy answers to the prior's weights.

        dF / dp_i = exp(beta v_i) / (beta sum_r p_r exp(beta v_r)) = exp(beta (v_i - F)) / beta      (Prop. E.6 iii)

    beta > 0: at 0 the term 1 / beta diverges, which is the same for all i and so moves nothing on the simplex. Zero
    outside the support. F is concave in p.
    """
    rows, beta = prepare(p, v, dim, beta=beta)
    positive("beta", beta)
    return as_given(torch.where(rows.p > 0, rows.log_ratio(beta).exp() / beta[..., None], 0), p, v, dim)


def logit_gradient(p: Along, v: Along, beta: PerRead, dim: int = -1) -> Along:
    """How the free energy answers to the logits b of a prior p = softmax(b).

        dF / db_i = (q_i - p_i) / beta,    p_i (v_i - mean) at beta = 0                               (Prop. E.6 iv)

    Gradient ascent moves the prior towards the posterior.
    """
    rows, beta = prepare(p, v, dim, beta=beta)
    flat, beta_or_one = rows.divisor(beta)
    tilt = torch.expm1(rows.log_ratio(beta)) / beta_or_one[..., None]
    return as_given(rows.p * torch.where(flat[..., None], rows.centred, tilt), p, v, dim)


class Concentration(NamedTuple):
    """What a finite beta guarantees about hard selection."""

    missed: Tensor  # 1 - q(S) is at most this
    lower: Tensor  # F is at least this
    upper: Tensor  # and at most this


def concentration(p: Along, v: Along, beta: PerRead, dim: int = -1) -> Concentration:
    """How much of the posterior the tokens S of the largest value v* can miss, and where F must lie.

        1 - q(S) <= (1 - p(S)) / p(S) exp(-beta margin)        v* + log p(S) / beta <= F <= v*                (Eq. 23)

    margin: from v* to the next smaller value of the support. S has one token in the paper; ties only help.
    beta > 0.
    """
    rows, beta = prepare(p, v, dim, beta=beta)
    positive("beta", beta)
    peak = rows.peak()
    upper = rows.mean + torch.where(peak.best, rows.centred, 0).amax(-1)
    missed = peak.rest / peak.mass * torch.exp(-beta * peak.margin)
    lower = upper + peak.mass.clamp_max(1).log() / beta
    return Concentration(*(as_given(bound, p, v) for bound in (missed, lower, upper)))
