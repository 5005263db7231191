"""`decay_scan`: sums in which older terms decay."""

import pytest
import torch
from fla_reference import hgrn

from fem.functional import decay_scan


def inputs(time, batch=2, channels=3, dtype=torch.float32):
    decay = -torch.rand(batch, time, channels, dtype=torch.float64).exponential_(4.0)
    u, start = (torch.randn(*shape, dtype=torch.float64) for shape in ((batch, time, channels), (batch, channels)))
    return tuple(tensor.to(dtype).requires_grad_() for tensor in (decay, u, start))


def compare(given, limit, backend="auto"):
    exact = tuple(tensor.detach().double().requires_grad_() for tensor in given)
    got, wanted = decay_scan(*given, backend=backend), hgrn(*exact)  # one step after the other
    weights = torch.randn_like(wanted)
    results = [got, *torch.autograd.grad((got.double() * weights).sum(), given)]
    expected = [wanted, *torch.autograd.grad((wanted * weights).sum(), exact)]
    for one, other in zip(results, expected):
        assert (one.double() - other).abs().max() <= limit * (other.abs().max() + 1e-3)


@pytest.mark.parametrize("time", [1, 2, 15, 16, 31, 32, 33, 127, 521])
def test_sums_and_gradients_are_those_of_the_recurrence(time):
    compare(inputs(time), 2e-6)
    compare(inputs(time), 2e-6, "reference")
    compare(inputs(time, dtype=torch.float64), 1e-13)


@pytest.mark.parametrize("level", [0.0, -1e-4, -1000.0, -torch.inf, None])
def test_any_decay_is_exact_at_thousands_of_tokens(level):
    """None: decays that mix nothing and all."""
    decay, u, start = inputs(2000 if level is None else 4099, batch=1, channels=2)
    pick = torch.rand_like(decay)
    mixed = torch.where(pick < 0.01, -torch.inf, torch.where(pick < 0.1, -1000.0, torch.where(pick < 0.5, 0.0, decay)))
    decay = mixed if level is None else torch.full_like(decay, level)
    compare((decay.detach().requires_grad_(), u, start), 1e-5)


def test_the_future_changes_nothing():
    decay, u, _ = (x.detach() for x in inputs(60))
    later = u.clone()
    later[:, 41:] = 1e30
    assert (decay_scan(decay, later) == decay_scan(decay, u))[:, :41].all()


def test_bfloat16_is_summed_in_float32():
    decay, u, start = (tensor.detach().bfloat16() for tensor in inputs(1000))
    got = decay_scan(decay, u, start)
    assert got.dtype == torch.bfloat16
    exact = hgrn(decay.double(), u.double(), start.double())
    assert (got.double() - exact).abs().max() <= 2**-8 * exact.abs().max()


def test_gradients_can_be_differentiated():
    given = tuple(tensor.detach()[..., :2].requires_grad_() for tensor in inputs(20, batch=1, dtype=torch.float64))
    assert torch.autograd.gradgradcheck(decay_scan, given)


@pytest.mark.parametrize("shape", [(0, 3, 2), (2, 0, 2)])
def test_a_scan_of_nothing_is_nothing(shape):
    leaves = [torch.zeros(s, requires_grad=True) for s in (shape, shape, (shape[0], shape[2]))]
    assert not any(x.any() for x in torch.autograd.grad(decay_scan(*leaves).sum(), leaves, materialize_grads=True))
