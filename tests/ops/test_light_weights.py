"""Scans with weights so light that a sum rounds them away, or that float32 does not hold their product."""

import pytest
import torch
from scan_reads import READS, relative, scan_call

from fem.functional import keyed_scan_read


def column(*x):
    return torch.tensor(x).view(1, -1, 1, 1)


ONE, BETA = column(1.0, 1.0), torch.ones(1, 1)


def test_a_light_key_of_an_earlier_chunk_has_its_gradient():
    """One key of the second chunk has all the weight that float32 can tell."""
    time = 129
    q, k, v = torch.ones(1, time, 1, 1), torch.full((1, time, 1, 1), 1e-9), torch.zeros(1, time, 1, 1)
    k[:, 64], v[0, :64, 0, 0] = 1.0, torch.linspace(-1, 1, 64)
    k.requires_grad_()
    results = []
    for backend in ("auto", "reference"):
        read = keyed_scan_read(q, k, v, BETA, backend=backend).free_energy[0, -1]
        results.append(torch.autograd.grad(read.sum(), k)[0])
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("beta", [None, BETA, 30 * BETA])
def test_a_light_side_of_a_read_in_both_directions_has_its_gradient(place, beta):
    """The light token is before the heavy one or after it; the value of either is the larger one."""
    for value in (1.0, -1.0):
        k, v = ONE.clone(), column(0.0, value)
        k[0, place] = 1e-9
        k.requires_grad_()
        read = keyed_scan_read(ONE, k, v, beta, causal=False)
        found = (read.mean if beta is None else read.free_energy)[0, 0]
        p, y = (k / k.sum()).double(), v.double()
        wanted = (p * y).sum() if beta is None else (p * (beta * y).exp()).sum().log() / beta
        slopes = [torch.autograd.grad(x.sum(), k)[0][0, place] for x in (found, wanted)]
        torch.testing.assert_close(*slopes, rtol=1e-4, atol=1e-6)


def test_a_side_of_low_values_has_its_gradient():
    """Its share of the free energy is e^-20."""
    v = column(0.0, -20.0).requires_grad_()
    read = keyed_scan_read(ONE, ONE, v, BETA, causal=False).free_energy[0, 0]
    slope = torch.autograd.grad(read.sum(), v)[0].flatten()
    torch.testing.assert_close(slope, torch.tensor([0.0, -20.0]).softmax(0), rtol=1e-4, atol=0)


@pytest.mark.parametrize("decay", [None, -torch.ones(1, 2, 1)])
def test_features_whose_products_underflow_are_read(decay):
    light, v = column(1e-25, 1e-25), column(1.0, 3.0)
    found = keyed_scan_read(light, light, v, BETA, decay)
    wanted = keyed_scan_read(light, light, v, BETA, decay, backend="reference")
    for own, other in zip(found, wanted):
        torch.testing.assert_close(own, other)


def test_the_mean_is_as_exact_without_a_free_energy_beside_it():
    k, v, decay = column(1.0, 0.0), column(5.0, 7.0), torch.full((1, 2, 1), -100.0)
    none = keyed_scan_read(ONE, k, v, BETA[:, :0], decay, free_values=v[..., :0])
    torch.testing.assert_close(none.mean, column(5.0, 5.0))


@pytest.mark.parametrize("name", READS)
def test_a_beta_beyond_all_values_reads_the_largest(name):
    """beta v would reach the number that stands for the logarithm of nothing."""
    call = scan_call(name, 9, beta=1e30)
    wanted = call.definition().free_energy
    assert relative(call.read().free_energy, wanted) < 1e-6
    assert relative(call.in_pieces(*[1] * 9).free_energy, wanted) < 1e-6
