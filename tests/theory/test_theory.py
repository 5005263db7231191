"""Every statement of fem.theory, against decimal arithmetic, autograd and brute force over the simplex."""

from __future__ import annotations

import itertools
import math
from decimal import Decimal, localcontext
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fem import theory

F64 = torch.float64
ONE_READ = (theory.free_energy, theory.kl_gap, theory.posterior_mean)
TEMPERATURES = (partial(theory.hidden_temperature, lam=0.5), "beta_max"), (theory.temperature_for_budget, "kl")


def slope(p, v, beta):
    """dF / dbeta, by autograd."""
    beta = torch.as_tensor(beta, dtype=F64).requires_grad_()
    return torch.autograd.grad(theory.free_energy(p, v, beta), beta)[0]


def nats(q, p):
    """KL(q || p)."""
    return (torch.xlogy(q, q) - torch.xlogy(q, p)).sum(-1)


def holds_for(rows, *strategies):
    """Over rows, of which a test takes p and v apart, and what else is drawn."""

    def over(test):
        def unpacked(drawn):
            (p, v), *others = drawn
            test(p, v, *others)

        unpacked.__name__, unpacked.__qualname__ = test.__name__, test.__qualname__
        return settings(max_examples=40, deadline=None)(given(st.tuples(rows, *strategies))(unpacked))

    return over


@st.composite
def rows(draw, least=1, zeros=True):
    """A distribution and values, with zeros and ties among them."""
    time = draw(st.integers(least, 7))
    weight = st.floats(-12, 3).map(math.exp)
    p = draw(st.lists(weight | st.just(0.0) if zeros else weight, min_size=time, max_size=time))
    p[draw(st.integers(0, time - 1))] = 1.0
    tidy = st.integers(-3, 3).map(float) | st.integers(-5000, 5000).map(lambda n: n / 1000)
    v = draw(st.lists(tidy, min_size=time, max_size=time))
    p = torch.tensor(p, dtype=F64)
    return p / p.sum(), torch.tensor(v, dtype=F64)


BETA = st.floats(-6, 2.5).map(lambda exponent: 10.0**exponent)


def distinct(p, v):
    return len(set(v[p > 0].tolist())) > 1


def by_definition(p, v, beta):
    """F, KL(p || q), KL(q || p) and q from Eq. 4 and 5, in 80 decimal digits."""
    with localcontext() as context:
        context.prec = 80
        p, v, beta = [Decimal(x) for x in p.tolist()], [Decimal(x) for x in v.tolist()], Decimal(beta)
        p = [x / sum(p) for x in p]
        weight = [a * (beta * b).exp() for a, b in zip(p, v)]
        q = [w / sum(weight) for w in weight]
        forward = sum(a * (a / b).ln() for a, b in zip(p, q) if a)
        backward = sum(b * (b / a).ln() for a, b in zip(p, q) if a)
        return float(sum(weight).ln() / beta), float(forward), float(backward), torch.tensor([float(x) for x in q])


def random_distributions(count, like):
    return torch.distributions.Dirichlet(torch.full_like(like, 0.7)).sample((count,))


def leaf(*values):
    return torch.tensor(values if len(values) > 1 else values[0], dtype=F64, requires_grad=True)


# Eq. 4 to 6: free energy, posterior, gap


@holds_for(rows(), BETA)
def test_reads_equal_the_definition_in_decimal_arithmetic(p, v, beta):
    value, forward, backward, q = by_definition(p, v, beta)
    close = {"rtol": 1e-12, "atol": 1e-13}
    torch.testing.assert_close(theory.free_energy(p, v, beta).item(), value, **close)
    torch.testing.assert_close(theory.kl_gap(p, v, beta).item(), forward, **close)
    torch.testing.assert_close(theory.posterior(p, v, beta), q.double(), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(slope(p, v, beta).item() * beta**2, backward, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(theory.posterior_mean(p, v, beta).item(), value + backward / beta, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("beta", [1e-12, 1e-9, 1e-6, 1e-3, 0.1])
def test_small_beta_loses_no_digit_of_the_gap(beta):
    p, v = torch.tensor([0.5, 0.3, 0.2], dtype=F64), torch.tensor([1.0, -2.0, 4.0], dtype=F64)
    assert theory.kl_gap(p, v, beta).item() == pytest.approx(by_definition(p, v, beta)[1], rel=1e-14, abs=0)


@pytest.mark.parametrize("span", [50.0, 1000.0, 1e6])
@pytest.mark.parametrize("weight", [0.3, 1e-30, 1e-300])
def test_spans_of_a_thousand_nats_are_exact(span, weight):
    p, v = torch.tensor([1 - weight, weight], dtype=F64), torch.tensor([0.0, span], dtype=F64)
    value, forward, _, q = by_definition(p, v, 1.0)
    torch.testing.assert_close(theory.free_energy(p, v, 1.0).item(), value, rtol=1e-15, atol=1e-15)
    torch.testing.assert_close(theory.kl_gap(p, v, 1.0).item(), forward, rtol=1e-14, atol=1e-15)
    torch.testing.assert_close(theory.posterior(p, v, 1.0).float(), q)


@holds_for(rows())
def test_beta_zero_is_the_plain_read(p, v):
    torch.testing.assert_close(theory.free_energy(p, v, 0.0), (p * v).sum())
    torch.testing.assert_close(theory.posterior(p, v, 0), p)
    assert theory.kl_gap(p, v, 0.0) == 0


@holds_for(rows())
def test_infinite_beta_is_hard_selection(p, v):
    best = (v == v[p > 0].max()) & (p > 0)
    torch.testing.assert_close(theory.free_energy(p, v, math.inf), v[best][0])
    torch.testing.assert_close(theory.posterior(p, v, math.inf), best * p / p[best].sum())
    assert theory.kl_gap(p, v, math.inf).item() == (math.inf if distinct(p, v) else 0)


@pytest.mark.parametrize("beta", [1e19, 1e300, math.inf])
@pytest.mark.parametrize("weight", [1e-17, 1e-300])
def test_the_largest_value_is_selected_however_light(beta, weight):
    p, v = torch.tensor([1.0, weight], dtype=F64), torch.tensor([0.0, 1.0], dtype=F64)
    assert theory.free_energy(p, v, beta).item() == pytest.approx(1.0)


@pytest.mark.parametrize("read", [*ONE_READ, theory.posterior])
@pytest.mark.parametrize("foreign", [math.inf, -math.inf, math.nan, 1e300])
def test_values_outside_the_support_are_not_read(read, foreign):
    p = leaf(0.25, 0.0, 0.75)
    v = leaf(1.0, foreign, -2.0)
    beta = leaf(1.5)
    result = read(p, v, beta)
    inside = read(p[[0, 2]].detach(), v[[0, 2]].detach(), 1.5)
    assert torch.equal(result[[0, 2]] if result.ndim else result, inside)
    assert result.ndim == 0 or result[1] == 0
    for gradient in torch.autograd.grad(result.sum(), (p, v, beta)):
        assert gradient.isfinite().all()
        assert gradient.ndim == 0 or gradient[1] == 0


@pytest.mark.parametrize("read, last", [*((read, "beta") for read in ONE_READ), *TEMPERATURES])
def test_a_value_that_is_no_number_is_no_number_in_its_own_row(read, last):
    p, v = torch.full((2, 3), 1 / 3, dtype=F64), torch.tensor([[1.0, math.nan, 2.0], [1.0, 0.0, 2.0]], dtype=F64)
    assert read(p, v, **{last: 0.5}).isnan().tolist() == [True, False]


def test_a_row_without_support_reads_zero():
    p, v = torch.zeros(3, dtype=F64), torch.tensor([1.0, 2.0, 3.0], dtype=F64)
    assert theory.free_energy(p, v, 2.0) == 0
    assert torch.equal(theory.posterior(p, v, 2.0), p)
    assert theory.hidden_temperature(p, v, 0.5, 2.0) == 1


@holds_for(rows(), BETA, st.floats(1.1, 4))
def test_free_energy_lies_between_mean_and_maximum_and_grows(p, v, beta, factor):
    low, high = theory.free_energy(p, v, beta), theory.free_energy(p, v, beta * factor)
    assert (p * v).sum() - 1e-14 <= low <= high + 1e-14 <= v[p > 0].max() + 2e-14
    assert theory.kl_gap(p, v, beta) >= 0


@holds_for(rows(zeros=False), st.floats(0.01, 20))
def test_donsker_varadhan_is_maximal_at_the_posterior(p, v, beta):
    value = theory.free_energy(p, v, beta)
    utility = lambda q: (q * v).sum(-1) - nats(q, p) / beta  # noqa: E731
    assert (utility(random_distributions(50, p)) <= value + 1e-12).all()
    torch.testing.assert_close(utility(theory.posterior(p, v, beta)), value)


def test_the_free_energy_starts_at_the_mean_with_half_the_variance():
    p, v = torch.tensor([0.2, 0.7, 0.1], dtype=F64), torch.tensor([0.0, 1.0, 3.0], dtype=F64)
    away = v - (p * v).sum()
    torch.testing.assert_close(slope(p, v, 0.0), (p * away**2).sum() / 2)
    for beta in (0.1, 0.01, 0.001):
        remainder = theory.free_energy(p, v, beta) - (p * v).sum() - beta / 2 * (p * away**2).sum()
        assert remainder.item() == pytest.approx(beta**2 * (p * away**3).sum().item() / 6, rel=beta)


# Propositions E.4 and E.6, Appendix M.4: gradients


@holds_for(rows(zeros=False), st.floats(0.01, 50))
def test_derivatives_are_posterior_slope_and_prior_gradients(p, v, beta):
    p, v, beta = p.requires_grad_(), v.requires_grad_(), leaf(beta)
    value = theory.free_energy(p, v, beta)
    by_p, by_v, by_beta = torch.autograd.grad(value, (p, v, beta), retain_graph=True)
    q = theory.posterior(p, v, beta)
    torch.testing.assert_close(by_v, q, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(by_beta * beta**2, nats(q, p), rtol=1e-7, atol=1e-10)
    wanted = (beta * (v - value)).exp() / beta
    torch.testing.assert_close(by_p - by_p[0], wanted - wanted[0], rtol=1e-9, atol=1e-10 * wanted.max().item())
    b = p.detach().log().requires_grad_()
    (by_logit,) = torch.autograd.grad(theory.free_energy(b.softmax(-1), v, beta), b)
    torch.testing.assert_close(by_logit, (q - p) / beta, rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("beta", [1e-3, 0.7, 30.0])
@pytest.mark.parametrize("read", [*ONE_READ, theory.posterior])
def test_autograd_agrees_with_finite_differences(read, beta):
    generator = torch.Generator().manual_seed(5)
    p = torch.rand(2, 5, dtype=F64, generator=generator).softmax(-1).requires_grad_()
    v = torch.randn(2, 5, dtype=F64, generator=generator).requires_grad_()
    tolerance = {"atol": 1e-4, "rtol": 1e-3} if beta < 0.01 else {}
    assert torch.autograd.gradcheck(read, (p, v, leaf(beta, 2.0)), eps=1e-6 * min(1.0, beta * 100), **tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("beta", [0.0, 1e-300, 1e-30, 1e-5, 1.0, 1e3, 1e10, math.inf])
@pytest.mark.parametrize("read", [theory.free_energy, theory.posterior, theory.posterior_mean])
def test_gradients_are_finite_at_every_temperature(read, beta, dtype):
    p = torch.tensor([0.5, 0.5 - 1e-6, 1e-6, 0.0], dtype=dtype, requires_grad=True)
    v = torch.tensor([1.0, -2.0, 3.0, 3.0], dtype=dtype, requires_grad=True)
    beta = torch.tensor(beta, dtype=dtype, requires_grad=True)
    result = read(p, v, beta)
    assert result.dtype == dtype
    for gradient in torch.autograd.grad(result.square().sum(), (p, v, beta)):
        assert gradient.isfinite().all()


@holds_for(rows(zeros=False), st.floats(0.01, 20))
def test_the_value_hessian_is_a_covariance_bounded_by_half_beta(p, v, beta):
    hessian = torch.autograd.functional.hessian(lambda v: theory.free_energy(p, v, beta), v)
    q = theory.posterior(p, v, beta)
    torch.testing.assert_close(hessian, beta * (q.diag() - q[:, None] * q), rtol=1e-8, atol=1e-9)
    eigenvalues = torch.linalg.eigvalsh(hessian)
    assert eigenvalues.min() >= -1e-12
    assert eigenvalues.max() <= beta / 2 + 1e-12


def test_two_equal_tokens_reach_the_curvature_bound():
    p, v = torch.tensor([0.5, 0.5], dtype=F64), torch.zeros(2, dtype=F64)
    hessian = torch.autograd.functional.hessian(lambda v: theory.free_energy(p, v, 3.0), v)
    assert torch.linalg.eigvalsh(hessian).max().item() == pytest.approx(1.5)


@holds_for(rows(least=2, zeros=False), st.floats(0.01, 20))
def test_concave_in_the_prior_convex_in_values_and_log_weights(p, v, beta):
    other_p, other_v = random_distributions(1, p)[0], torch.randn_like(v)
    middle = theory.free_energy((p + other_p) / 2, v, beta)
    assert middle >= (theory.free_energy(p, v, beta) + theory.free_energy(other_p, v, beta)) / 2 - 1e-10
    middle = theory.free_energy(p, (v + other_v) / 2, beta)
    assert middle <= (theory.free_energy(p, v, beta) + theory.free_energy(p, other_v, beta)) / 2 + 1e-10

    def unnormalised(w):
        return theory.free_energy(w.softmax(-1), v, beta) + w.logsumexp(-1) / beta

    w, other_w = p.log(), torch.randn_like(p)
    assert unnormalised((w + other_w) / 2) <= (unnormalised(w) + unnormalised(other_w)) / 2 + 1e-9


def test_the_hessian_in_the_logits_is_a_difference_of_covariances_without_a_sign():
    b, v, beta = torch.tensor([2.0, 1.0, 0.0], dtype=F64), torch.tensor([0.0, 1.0, 3.0], dtype=F64), 1.0
    p = b.softmax(-1)
    q = theory.posterior(p, v, beta)
    covariance = lambda r: r.diag() - r[:, None] * r[None, :]  # noqa: E731
    hessian = torch.autograd.functional.hessian(lambda b: theory.free_energy(b.softmax(-1), v, beta), b)
    torch.testing.assert_close(hessian, (covariance(q) - covariance(p)) / beta)
    eigenvalues = torch.linalg.eigvalsh(hessian)
    assert eigenvalues.min() < -0.01
    assert eigenvalues.max() > 0.01


# Proposition E.6: invariances


@holds_for(rows(), BETA, st.floats(-1000, 1000), st.floats(0.1, 10))
def test_shift_and_scale(p, v, beta, shift, scale):
    value = theory.free_energy(p, v, beta)
    torch.testing.assert_close(theory.free_energy(p, v + shift, beta), value + shift, rtol=1e-12, atol=1e-12)
    scaled = theory.free_energy(p, scale * v, beta)
    torch.testing.assert_close(scaled, scale * theory.free_energy(p, v, scale * beta), rtol=1e-12, atol=1e-12)


def test_restricting_the_support_lowers_the_free_energy_only_without_renormalising():
    p, v, beta = torch.tensor([0.5, 0.5], dtype=F64), torch.tensor([0.0, 1.0], dtype=F64), 1.0
    kept = torch.tensor([0.0, 1.0], dtype=F64)
    whole, renormalised = theory.free_energy(p, v, beta), theory.free_energy(kept, v, beta)
    assert renormalised > whole
    assert (kept * v).sum() - nats(kept, p) / beta < whole


# Proposition E.5: concentration


@holds_for(rows(), st.floats(0.01, 50))
def test_concentration_bounds_hold_with_ties_too(p, v, beta):
    top = v[p > 0].max()
    best = (v == top) & (p > 0)
    rest = (p > 0) & ~best
    margin = (top - v[rest].max()).item() if rest.any() else 0.0
    q, mass = theory.posterior(p, v, beta), p[best].sum()
    assert q[rest].sum() <= p[rest].sum() / mass * math.exp(-beta * margin) * (1 + 1e-9) + 1e-15
    assert top + mass.log() / beta - 1e-12 <= theory.free_energy(p, v, beta) <= top + 1e-12


def test_the_bound_without_the_prior_weight_is_wrong():
    p, v, beta = torch.tensor([0.99, 0.01], dtype=F64), torch.tensor([0.0, 1.0], dtype=F64), 2.0
    held = theory.posterior(p, v, beta)[1].item()
    assert round(held, 3) == 0.069 < 1 - math.exp(-beta)  # Proposition G.5 claims at least this much


def test_the_posterior_nears_the_maximum_exponentially_the_free_energy_like_one_over_beta():
    p, v = torch.tensor([0.7, 0.3], dtype=F64), torch.tensor([0.0, 1.0], dtype=F64)
    for beta in (20.0, 40.0, 80.0):
        assert 1 - theory.posterior_mean(p, v, beta) <= 3 * math.exp(-beta) + 1e-15
        shortfall = beta * (1 - theory.free_energy(p, v, beta))
        assert shortfall.item() == pytest.approx(-math.log(0.3), rel=1e-6)


# Eq. 8: hidden temperature


@holds_for(rows(), st.floats(0, 1), BETA)
def test_the_interpolated_read_is_the_free_energy_at_its_hidden_temperature(p, v, lam, beta_max):
    beta = theory.hidden_temperature(p, v, lam, beta_max)
    assert 0 <= beta <= beta_max
    u = (1 - lam) * (p * v).sum() + lam * theory.free_energy(p, v, beta_max)
    assert (theory.free_energy(p, v, beta) - u).abs() <= 1e-13 * (1 + u.abs())


@holds_for(rows(), BETA, st.sampled_from([0.0, 0.3, 1.0]))
def test_hidden_temperature_at_its_ends_and_for_constant_values(p, v, beta_max, lam):
    assert theory.hidden_temperature(p, v, 0.0, beta_max) == 0
    assert theory.hidden_temperature(p, v, 1.0, beta_max).item() == beta_max
    assert theory.hidden_temperature(p, torch.full_like(v, 0.1), lam, beta_max).item() == lam * beta_max
    assert theory.hidden_temperature(p, v, lam, 0.0) == 0


@pytest.mark.parametrize("weight", [1e-300, 1e-20, 0.5])
@pytest.mark.parametrize("beta_max", [1e-6, 2.0, 1000.0])
def test_hidden_temperature_of_extreme_rows(weight, beta_max):
    p = torch.tensor([1 - weight, weight / 2, weight / 2], dtype=F64)
    v = torch.tensor([0.0, 1.0, 1 - 1e-9], dtype=F64)
    lam = torch.tensor([1e-12, 1e-3, 0.5, 1 - 1e-12], dtype=F64)
    beta = theory.hidden_temperature(p, v, lam, beta_max)
    u = (1 - lam) * (p * v).sum() + lam * theory.free_energy(p, v, beta_max)
    assert ((theory.free_energy(p, v, beta) - u).abs() <= 1e-13).all()
    assert (beta.diff() >= 0).all()


def test_the_gate_reparameterises_the_temperature():
    p, v = torch.tensor([0.6, 0.3, 0.1], dtype=F64), torch.tensor([0.0, 1.0, 3.0], dtype=F64)
    lam, step, beta_max = 0.4, 1e-5, 5.0
    ends = theory.hidden_temperature(p, v, torch.tensor([lam - step, lam + step], dtype=F64), beta_max)
    beta = theory.hidden_temperature(p, v, lam, beta_max)
    gain = theory.kl_gap(p, v, beta_max) / beta_max
    assert (ends.diff() / (2 * step)).item() == pytest.approx((gain / slope(p, v, beta)).item())


# Theorem 2.8: budget


@holds_for(rows(least=2), st.floats(-8, 1).map(lambda exponent: 10.0**exponent))
def test_the_budget_is_spent_to_the_last_nat(p, v, kl):
    beta = theory.temperature_for_budget(p, v, kl)
    hard = -math.log(p[(v == v[p > 0].max())].sum().clamp_max(1))
    if not distinct(p, v) or kl > hard + 1e-12:
        assert beta == math.inf
    elif kl < hard - 1e-9:
        assert nats(theory.posterior(p, v, beta), p) == pytest.approx(kl, rel=1e-6, abs=1e-13)
        spent = theory.free_energy(p, v, beta) + kl / beta
        torch.testing.assert_close(theory.posterior_mean(p, v, beta), spent, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("beta", [0.1, 0.7, 2.0, 9.0])
@pytest.mark.parametrize("v", [(0.0, 1.0, 3.0), (2.0, 2.0, -1.0)])
def test_no_distribution_within_the_budget_that_the_posterior_spends_does_better(beta, v):
    p, v = torch.tensor([0.55, 0.3, 0.15], dtype=F64), torch.tensor(v, dtype=F64)
    best, budget = theory.posterior_mean(p, v, beta), nats(theory.posterior(p, v, beta), p)
    n = 200
    grid = torch.tensor([(a, b, n - a - b) for a in range(n + 1) for b in range(n + 1 - a)], dtype=F64) / n
    reached = (grid @ v)[nats(grid, p) <= budget]
    assert best - 0.2 <= reached.max() <= best + 1e-12
    torch.testing.assert_close(best, theory.free_energy(p, v, beta) + budget / beta)  # not the free energy


def test_a_budget_for_hard_selection_has_no_finite_temperature():
    p, v = torch.tensor([0.5, 0.25, 0.25], dtype=F64), torch.tensor([0.0, 1.0, 1.0], dtype=F64)
    budgets = torch.tensor([0.0, 0.5, math.log(2) - 1e-12, math.log(2), 3.0, math.inf], dtype=F64)
    betas = theory.temperature_for_budget(p, v, budgets)
    assert betas[0] == 0
    assert (betas.diff().nan_to_num(0) >= 0).all()
    assert betas.isinf().tolist() == [False, False, False, True, True, True]


def test_budgets_that_lift_a_token_of_prior_weight_1e_300():
    p, v = torch.tensor([1.0, 1e-300], dtype=F64), torch.tensor([0.0, 1.0], dtype=F64)
    for kl in (1e-290, 1e-9, 1.0, 600.0, 690.77):
        assert nats(theory.posterior(p, v, theory.temperature_for_budget(p, v, kl)), p) == pytest.approx(kl, abs=1e-10)
    assert theory.temperature_for_budget(p, v, 690.78) == math.inf


# Lemma 2.2, Corollary 2.3, Lemmas 2.4 and 2.5, Theorem E.7, Appendix M: capacity


def test_every_pattern_of_winners_is_reached_at_a_finite_temperature_and_a_head_reaches_t():
    t, channels = 4, 3
    p = torch.tensor([0.7, 0.2, 0.09, 0.01], dtype=F64)
    patterns = torch.tensor(list(itertools.product(range(t), repeat=channels)))
    v = torch.zeros(len(patterns), channels, t, dtype=F64).scatter(-1, patterns[..., None], 1.0)
    beta = 1.01 * (p.max() / p[patterns]).log()  # log(p_r / p_a) / margin for the heaviest rival r
    weights = theory.posterior(p, v, beta + 0.01)
    assert torch.equal(weights.argmax(-1), patterns)
    assert len(weights.argmax(-1).unique(dim=0)) == t**channels
    heads = torch.rand(500, 1, t, dtype=F64).expand(-1, channels, -1)
    assert len(heads.argmax(-1).unique(dim=0)) == t


@holds_for(rows(least=2, zeros=False))
def test_a_convex_read_misses_maxima_that_sit_on_different_tokens(p, v):
    v = torch.eye(len(p), dtype=F64)[:2]  # two channels, won by the first and the second token
    assert (p * v).sum(-1).sum() <= 1 + 1e-12  # a hull point has mean_1 + mean_2 <= 1, the maxima add up to 2
    torch.testing.assert_close(theory.free_energy(p, v, 1e9), torch.ones(2, dtype=F64))


@holds_for(rows(least=2, zeros=False))
def test_a_convex_read_between_two_maps_of_coordinates_is_the_free_energy(p, v):
    v, beta = torch.eye(len(p), dtype=F64)[:2], 300.0
    read = ((p * (beta * (v - 1)).exp()).sum(-1).log() / beta) + 1
    torch.testing.assert_close(read, theory.free_energy(p, v, beta))
    assert (read - 1 >= p[:2].log() / beta - 1e-12).all()  # both maxima, which sit on different tokens


def test_the_kernel_of_the_value_map_is_that_of_its_weights():
    """Appendix M.3, with the gate behind W_O as it stands there: <do_j / dW_V, do_j' / dW_V> in closed form."""
    draw = torch.Generator().manual_seed(0)
    h, w_v, w_o = (torch.randn(*shape, dtype=F64, generator=draw) for shape in ((6, 4), (4, 3), (3, 3)))
    lam, g, beta = (torch.rand(3, dtype=F64, generator=draw) * 0.8 + 0.1 for _ in range(3))
    p = torch.rand(6, dtype=F64, generator=draw).softmax(-1)

    def output(weight):
        mean, free = (theory.free_energy(p, (h @ weight).T, at) for at in (0.0, beta))
        return g * (w_o @ ((1 - lam) * mean + lam * free))

    jacobian = torch.autograd.functional.jacobian(output, w_v).flatten(1)
    weights = theory.effective_weights(p, (h @ w_v).T, lam, beta)
    pairs = torch.einsum("ci,cr,ir->c", weights, weights, h @ h.T)
    torch.testing.assert_close(jacobian @ jacobian.T, g[:, None] * g * ((w_o * pairs) @ w_o.T))


def test_weights_of_a_head_have_rank_one_and_those_of_fem_full_rank():
    v = torch.randn(5, 8, dtype=F64, generator=torch.Generator().manual_seed(0))
    p = torch.full((8,), 1 / 8, dtype=F64)
    assert torch.linalg.matrix_rank(theory.effective_weights(p, v, 0.5, 2.0)) == 5
    assert torch.linalg.matrix_rank(theory.effective_weights(p, v, 0.0, 2.0)) == 1


@holds_for(rows(), st.floats(0, 1), st.floats(0.01, 20))
def test_effective_weights_are_the_derivative_of_the_interpolated_read(p, v, lam, beta):
    v.requires_grad_()
    u = (1 - lam) * (p * v).sum() + lam * theory.free_energy(p, v, beta)
    weights = theory.effective_weights(p, v, lam, beta)
    torch.testing.assert_close(torch.autograd.grad(u, v)[0], weights, rtol=1e-9, atol=1e-12)
    average = (weights * v).sum()
    assert average >= u - 1e-12
    torch.testing.assert_close(average - u, lam * beta * slope(p, v.detach(), beta), rtol=1e-7, atol=1e-10)


# Appendix P


def test_index_accuracy_counts_channels_whose_nearest_value_is_the_winner():
    values = torch.tensor([[0.0, 0.0, 5.0], [1.0, 1.0, 1.0], [0.1, 0.2, 1.0]])
    winner = torch.tensor([1, 1, 0])
    assert theory.index_accuracy(values.amax(0), values, winner) == 1
    assert theory.index_accuracy(torch.tensor([0.9, 0.55, 2.9]), values, winner).item() == pytest.approx(1 / 3)
    tied = torch.tensor([1, 1, 2])
    assert theory.index_accuracy(torch.tensor([1.0, 1.0, 0.0]), values, tied) == 1
    assert theory.index_accuracy(torch.full((3,), math.nan), values, winner) == 0


# Shapes, dtypes, errors


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2, -3])
def test_any_axis_may_hold_the_tokens(dim):
    generator = torch.Generator().manual_seed(2)
    p = torch.rand(2, 3, 5, dtype=F64, generator=generator)
    p, v = p / p.sum(dim, keepdim=True), torch.randn(2, 3, 5, dtype=F64, generator=generator)
    beta = torch.rand(v.sum(dim).shape, dtype=F64, generator=generator)
    last = (p.movedim(dim, -1), v.movedim(dim, -1), beta)
    for read in ONE_READ:
        torch.testing.assert_close(read(p, v, beta, dim=dim), read(*last))
    torch.testing.assert_close(theory.posterior(p, v, beta, dim=dim), theory.posterior(*last).movedim(-1, dim))
    lam = torch.full_like(beta, 0.3)
    found = theory.hidden_temperature(p, v, lam, beta, dim=dim)
    torch.testing.assert_close(found, theory.hidden_temperature(*last[:2], lam, beta))


def test_priors_are_shared_by_channels_and_betas_by_rows():
    p = torch.tensor([[0.2, 0.8], [0.5, 0.5]], dtype=F64)[:, :, None]
    v = torch.tensor([[1.0, 0.0, 3.0], [0.0, 2.0, -1.0]], dtype=F64)
    beta = torch.tensor([0.0, 1.0, 2.0], dtype=F64)
    reads = theory.free_energy(p, v, beta, dim=-2)
    assert reads.shape == (2, 3)
    for row, channel in itertools.product(range(2), range(3)):
        torch.testing.assert_close(reads[row, channel], theory.free_energy(p[row, :, 0], v[:, channel], beta[channel]))
    assert theory.free_energy(p[0, :, 0], v[:, 0], torch.linspace(0, 3, 4)).shape == (4,)
    columns = p[:, :, 0] / p[:, :, 0].sum(0)
    posteriors = theory.posterior(columns, v[:, :2], torch.ones(4, 2), dim=0)  # beta adds an axis in front
    torch.testing.assert_close(posteriors, theory.posterior(columns, v[:, :2], 1.0, dim=0).expand(4, 2, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_results_have_the_inputs_dtype_and_its_precision(dtype):
    p = torch.tensor([0.5, 0.25, 0.25], dtype=dtype)
    v = torch.tensor([100.0, -100.0, 300.0], dtype=dtype)
    for read in (*ONE_READ, theory.posterior):
        result = read(p, v, 2.0)
        assert result.dtype == dtype
        torch.testing.assert_close(result, read(p.double(), v.double(), 2.0).to(dtype))
    assert theory.hidden_temperature(p, v, 0.5, 2.0).dtype == dtype


def test_vmap_maps_over_rows_and_over_beta():
    p, v = torch.rand(3, 5, dtype=F64).softmax(-1), torch.randn(3, 5, dtype=F64)
    rows = torch.vmap(lambda p, v: theory.free_energy(p, v, 2.0))(p, v)
    torch.testing.assert_close(rows, theory.free_energy(p, v, 2.0))
    betas = torch.vmap(lambda beta: theory.free_energy(p[0], v[0], beta))(torch.tensor([0.5, 2.0], dtype=F64))
    torch.testing.assert_close(betas[1], theory.free_energy(p[0], v[0], 2.0))
