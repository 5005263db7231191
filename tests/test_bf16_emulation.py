"""What bfloat16 costs the kernels: their arithmetic in PyTorch, operands of matrix products rounded to bfloat16."""

import math

import pytest
import torch

from fem.ops import reference

TIME, KEY, VALUE, BETA, PROVEN = 256, 64, 32, 1.95, math.exp(-60.0)
ROUNDING = 2**-8  # bfloat16 has 8 digits
CASES = ["normal", "sharp", "span 40", "span 80", "spike 40", "spike 80", "small beta"]


def rounded(x):
    return x.bfloat16().float()


def inputs(case):
    kind, _, size = case.partition(" ")
    q, k, v = torch.randn(TIME, KEY), torch.randn(TIME, KEY), torch.randn(TIME, VALUE)
    beta = torch.full((VALUE,), BETA)
    if kind == "sharp":
        q = 4 * q
    if kind == "span":
        v = (torch.rand(TIME, VALUE) - 0.5) * float(size) / BETA
    if kind == "spike":
        v = 0.5 * v
        v[TIME // 2] = float(size) / BETA
    if kind == "small":
        beta = beta / 100
    return rounded(q), rounded(k), rounded(v), beta


def values(v, beta):
    """[v | E], c and a, as in fem/kernels/softmax_values.py."""
    w = v * beta * math.log2(math.e)
    near = w.abs().amax(0) < 1
    shift = torch.where(near, 0.0, w.amax(0).ceil())
    e = torch.where(near, torch.expm1(w * math.log(2)), torch.exp2(w - shift))
    return rounded(e), shift, near.float()


def prior(q, k):
    """P and l, as in fem/kernels/softmax_forward.py."""
    s = (q @ k.T) * KEY**-0.5 * math.log2(math.e)
    s = s.masked_fill(torch.ones(TIME, TIME, dtype=torch.bool).triu(1), -torch.inf)
    p = torch.exp2(s - s.amax(1, keepdim=True).ceil())
    return p, rounded(p).sum(1, keepdim=True)


def forward(q, k, v, beta):
    e, shift, near = values(v, beta)
    p, weight = prior(q, k)
    mean, total = rounded(p) @ v / weight, rounded(p) @ e / weight
    log = torch.where(near > 0, torch.log1p(total) / math.log(2), total.log2() + shift)
    return mean, log / (beta * math.log2(math.e)), total


def backward(q, k, v, beta, grad_mean, grad_free, mean, total):
    """As in fem/kernels/softmax_backward.py, and which entries it leaves to the definition."""
    e, shift, near = values(v, beta)
    p, weight = prior(q, k)
    rate = beta * math.log2(math.e)
    settled = total + near >= PROVEN
    of_mean = rounded(grad_mean / weight)
    slope = rounded(torch.where(settled, grad_free / beta / (total + near), 0.0) / weight)
    delta = (of_mean * rounded(mean) + slope * total).sum(1, keepdim=True)
    ds = rounded(p * (of_mean @ v.T + slope @ e.T - delta))
    posterior = (e + near) * (rounded(p).T @ slope)
    above = torch.where(near > 0, torch.log1p(total), total.log()) / beta
    rows = torch.where(settled, slope * weight * (total + near) * above, 0.0)
    return (
        ds @ k * KEY**-0.5,
        ds.T @ q * KEY**-0.5,
        rounded(p).T @ of_mean + beta * posterior,
        (posterior * (v - shift / rate)).sum(0) - rows.sum(0),
    ), ~settled


def exact(q, k, v, beta):
    read = reference.softmax_read(*(x[None, :, None] for x in (q, k, v)), beta[None])
    return read.mean[0, :, 0], read.free_energy[0, :, 0]


@pytest.mark.parametrize("case", CASES)
def test_the_free_energy_is_within_the_roundings_of_one_prior_and_one_exponential(case):
    arguments = inputs(case)
    _, free_energy, total = forward(*arguments)
    _, want = exact(*arguments)
    proven = (total >= PROVEN) | (total < 0)
    beta = arguments[3]
    assert ((free_energy - want).abs() * beta)[proven].max() <= 2.1 * ROUNDING
    assert proven.float().mean() >= (0.49 if case == "spike 80" else 0.99)


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_as_good_as_their_operands(case):
    arguments = inputs(case)
    weights = torch.randn(2, TIME, VALUE)
    mean, _, total = forward(*arguments)
    ours, left = backward(*arguments, *weights, mean, total)
    leaves = [x.double().requires_grad_() for x in arguments]
    read = exact(*leaves)
    want = torch.autograd.grad(sum((x * w).sum() for x, w in zip(read, weights)), leaves, retain_graph=True)
    again = torch.autograd.grad((read[1] * weights[1] * left).sum(), leaves)
    for name, got, more, whole in zip(("dq", "dk", "dv", "dbeta"), ours, again, want):
        error = (got + more - whole).norm() / whole.norm()
        allowed = ROUNDING if name != "dbeta" else 2.5e-3 if case != "small beta" else 5e-2
        assert error <= allowed, (name, error)
