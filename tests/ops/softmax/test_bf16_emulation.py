"""What bfloat16 inputs cost the kernels: their arithmetic in PyTorch, operands of matrix products rounded.

q, k and ds are bfloat16. P, [v | E] and g are float16 where that holds them, else tf32, with 11 digits either way.
"""

import math

import pytest
import torch

from fem.ops.softmax.channels import channel_tables, least_totals
from fem.ops.softmax.naive import naive_softmax_read

TIME, KEY, VALUE, BETA, PROVEN = 256, 64, 32, 1.95, math.exp(-60.0)
LIFT = 15  # float16 holds 2^15
CASES = {"normal": True, "sharp": True, "small beta": True, "span 40": False, "span 80": False, "spike 40": False}
CASES |= {"spike 80": False}  # whether float16 holds E
both = pytest.mark.parametrize(("case", "narrow"), CASES.items())


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


def operand(x, narrow):
    if narrow:
        return x.half().float()
    return ((x.contiguous().view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)


def values(v, beta, narrow):
    """[v | E] in their units, c, a, and the units, as in fem/ops/softmax/kernels/values.py."""
    w = v * beta * math.log2(math.e)
    near = w.abs().amax(0) < 1
    lift = LIFT if narrow else 0
    shift = torch.where(near, 0.0, w.amax(0).ceil() - lift)
    power = lambda x: 2.0 ** (torch.frexp(x.abs().amax(0)).exponent - LIFT) if narrow else torch.ones(VALUE)  # noqa: E731
    of_v, unit = power(v), torch.where(near, power(w), 1.0)
    e = torch.where(near, torch.expm1(w * math.log(2)) / unit, torch.exp2(w - shift))
    return operand(v / of_v, narrow), operand(e, narrow), shift, near.float(), of_v, unit


def prior(q, k, narrow):
    """P, rounded too, and l, as in fem/ops/softmax/kernels/forward.py."""
    s = (q @ k.T) * KEY**-0.5 * math.log2(math.e)
    s = s.masked_fill(torch.ones(TIME, TIME, dtype=torch.bool).triu(1), -torch.inf)
    p = torch.exp2(s - s.amax(1, keepdim=True).ceil() + (LIFT if narrow else 0))
    return p, operand(p, narrow), operand(p, narrow).sum(1, keepdim=True)


def forward(q, k, v, beta, narrow):
    x, e, shift, near, of_v, unit = values(v, beta, narrow)
    _, p, weight = prior(q, k, narrow)
    mean, total = p @ x / weight * of_v, p @ e / weight
    log = torch.where(near > 0, torch.log1p(total * unit) / math.log(2), total.log2() + shift)
    return mean, log / (beta * math.log2(math.e)), total


def backward(q, k, v, beta, grad_mean, grad_free, mean, total, narrow):
    """As in fem/ops/softmax/kernels/backward.py, and which entries it leaves to the definition."""
    x, e, shift, near, of_v, unit = values(v, beta, narrow)
    p, rounded_p, weight = prior(q, k, narrow)
    rate = beta * math.log2(math.e)
    whole = total * unit + near
    settled = whole >= PROVEN
    g = torch.cat([grad_mean * of_v, torch.where(settled, grad_free / beta / whole, 0.0) * unit], 1) / weight
    exponent = torch.frexp(g.abs().amax(1, keepdim=True)).exponent - LIFT + 1 if narrow else torch.zeros(TIME, 1)
    top = exponent.max()
    g = operand(g * 2.0**-exponent, narrow)
    of_mean, slope = g.chunk(2, 1)
    delta = (of_mean * rounded(mean) / of_v + slope * total).sum(1, keepdim=True)
    p = p * 2.0 ** (exponent - top)
    rounded_p = operand(p, narrow)
    ds = rounded(p * (of_mean @ x.T + slope @ e.T - delta)) * 2.0**top
    posterior = (e + near / unit) * (rounded_p.T @ slope) * 2.0**top
    above = torch.where(near > 0, torch.log1p(total * unit), total.log()) / beta
    rows = torch.where(settled, slope * 2.0**exponent * weight * (total + near / unit) * above, 0.0)
    return (
        ds @ k * KEY**-0.5,
        ds.T @ q * KEY**-0.5,
        rounded_p.T @ of_mean * 2.0**top / of_v + beta * posterior,
        (posterior * (v - shift / rate)).sum(0) - rows.sum(0),
    ), ~settled


def exact(q, k, v, beta):
    read = naive_softmax_read(*(x[None, :, None] for x in (q, k, v)), beta[None])
    return read.mean[0, :, 0], read.free_energy[0, :, 0]


@both
def test_the_free_energy_is_within_the_roundings_of_eleven_digits(case, narrow):
    arguments = inputs(case)
    _, free_energy, total = forward(*arguments, narrow)
    _, want = exact(*arguments)
    proven = (total >= PROVEN) | (total < 0)
    beta = arguments[3]
    assert ((free_energy - want).abs() * beta)[proven].max() <= 3 * 2**-11 <= 4e-3
    assert proven.float().mean() >= (0.49 if case == "spike 80" else 0.99)


@both
def test_gradients_are_as_good_as_their_operands(case, narrow):
    arguments = inputs(case)
    weights = torch.randn(2, TIME, VALUE)
    mean, _, total = forward(*arguments, narrow)
    ours, left = backward(*arguments, *weights, mean, total, narrow)
    leaves = [x.double().requires_grad_() for x in arguments]
    read = exact(*leaves)
    want = torch.autograd.grad(sum((x * w).sum() for x, w in zip(read, weights)), leaves, retain_graph=True)
    again = torch.autograd.grad((read[1] * weights[1] * left).sum(), leaves)
    allowed = {"dq": 2**-8, "dk": 2**-8, "dv": 2**-11, "dbeta": 2e-3 if case != "small beta" else 1e-2}
    for (name, most), got, more, whole in zip(allowed.items(), ours, again, want):
        error = (got + more - whole).norm() / whole.norm()
        assert error <= most, (name, error)


def test_what_float16_flushes_is_little_of_a_proven_entry():
    """Of the keys that P flushes, each could have the greatest E."""
    q, k, v, beta = inputs("normal")
    _, e, _, _, _, _ = values(v, beta, True)
    table = channel_tables(beta[None], *(x[None, None] for x in torch.aminmax(v, dim=0)), VALUE, True)[0]
    least = least_totals(table, e.sum(0)[None, None], True)[0, 0]
    flushed = 2.0**-25 * e.sum(0) / 2.0 ** (LIFT - 1)
    assert (flushed <= 2**-9 * least).all()
    assert (2**-10 * least >= 2.0**-25).all()
    assert (forward(q, k, v, beta, True)[2] > least).all()
