"""`decay_scan`: sums in which older terms decay."""

import pytest
import torch

from fem.functional import decay_scan
from fem.ops.decay_scan.naive_decay_scan import naive_decay_scan


def inputs(time, batch=2, channels=3, dtype=torch.float32):
    decay = -torch.rand(batch, time, channels, dtype=torch.float64).exponential_(4.0)
    u, start = (torch.randn(*shape, dtype=torch.float64) for shape in ((batch, time, channels), (batch, channels)))
    return tuple(tensor.to(dtype).requires_grad_() for tensor in (decay, u, start))


def compare(given, limit):
    exact = tuple(tensor.detach().double().requires_grad_() for tensor in given)
    got, wanted = decay_scan(*given), naive_decay_scan(*exact)
    weights = torch.randn_like(wanted)
    results = [got, *torch.autograd.grad((got.double() * weights).sum(), given)]
    expected = [wanted, *torch.autograd.grad((wanted * weights).sum(), exact)]
    for one, other in zip(results, expected):
        assert (one.double() - other).abs().max() <= limit * (other.abs().max() + 1e-3)


@pytest.mark.parametrize("time", [1, 2, 15, 16, 31, 32, 33, 127, 521])
def test_sums_and_gradients_are_those_of_the_recurrence(time):
    compare(inputs(time), 2e-6)
    compare(inputs(time, dtype=torch.float64), 1e-13)


@pytest.mark.parametrize("level", [0.0, -1e-4, -1000.0, -torch.inf])
def test_any_decay_is_exact_at_eight_thousand_tokens(level):
    decay, u, start = inputs(8192, batch=1, channels=2)
    compare((torch.full_like(decay, level).requires_grad_(), u, start), 1e-5)


def test_decays_that_mix_nothing_and_all_are_exact():
    decay, u, start = inputs(2000)
    pick = torch.rand_like(decay)
    mixed = torch.where(pick < 0.01, -torch.inf, torch.where(pick < 0.1, -1000.0, torch.where(pick < 0.5, 0.0, decay)))
    compare((mixed.detach().requires_grad_(), u, start), 1e-5)


def test_a_document_boundary_forgets():
    decay, u, start = inputs(40)
    cut = decay.detach().clone()
    cut[:, 23] = -torch.inf
    torch.testing.assert_close(decay_scan(cut, u, start)[:, 23:], decay_scan(decay[:, 23:], u[:, 23:]))


@pytest.mark.parametrize("size", [1, 7, 64])
def test_chunks_continue_from_the_last_sum(size):
    decay, u, start = inputs(129)
    state, pieces = start, []
    for a, x in zip(decay.split(size, 1), u.split(size, 1)):
        pieces.append(decay_scan(a, x, state))
        state = pieces[-1][:, -1]
    torch.testing.assert_close(torch.cat(pieces, 1), decay_scan(decay, u, start), rtol=1e-5, atol=1e-6)


def test_future_terms_change_nothing():
    decay, u, _ = inputs(100)
    later = u.detach().clone()
    later[:, 61:] = 1e30
    assert (decay_scan(decay, later) == decay_scan(decay, u))[:, :61].all()


def test_bfloat16_is_summed_in_float32():
    decay, u, start = (tensor.detach().bfloat16() for tensor in inputs(3000))
    got = decay_scan(decay, u, start)
    assert got.dtype == torch.bfloat16
    exact = naive_decay_scan(decay, u, start)
    assert (got.double() - exact).abs().max() <= 2**-8 * exact.abs().max()


def test_gradients_can_be_differentiated():
    given = tuple(tensor.detach()[..., :2].requires_grad_() for tensor in inputs(35, batch=1, dtype=torch.float64))
    assert torch.autograd.gradgradcheck(decay_scan, given)


def test_the_backends_sum_the_same_and_unknown_ones_are_named():
    decay, u, start = (tensor.detach() for tensor in inputs(9))
    torch.testing.assert_close(decay_scan(decay, u, start, "reference"), decay_scan(decay, u, start, "plain"))
    with pytest.raises(ValueError, match="backend must be one of"):
        decay_scan(decay, u, start, "cuda")
