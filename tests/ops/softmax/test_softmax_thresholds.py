"""The limits inside the softmax read, each at a point where another limit would be seen."""

import pytest
import torch
from naive_softmax import naive_softmax_read
from thresholds import flushed, one_spike_behind_two_tokens

from fem.functional import softmax_read


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("log_weight", [-15.0, -20.0, -23.5])
def test_nothing_is_lost_where_the_processor_flushes_small_numbers_to_zero(log_weight):
    """A certificate below e^-80 would take what is left of a flushed sum for the whole."""
    v, beta = one_spike_behind_two_tokens()
    q, k = torch.ones(1, v.shape[1], 1, 16), torch.zeros(1, v.shape[1], 1, 16)
    k[0, 0] = log_weight / 4
    with flushed():
        found = softmax_read(q, k, v, beta, scale=0.25).free_energy
    wanted = naive_softmax_read(q, k, v, beta, scale=0.25).free_energy
    assert (found - wanted).abs().max() <= 1e-5 * v.abs().max()


def test_a_row_with_one_likely_key_keeps_the_digits_of_its_small_gradient():
    """What reaches the query is the small difference of the other keys, not the rounding of the likely one."""
    q, k, v = torch.ones(1, 40, 1, 16), torch.randn(1, 40, 1, 16) / 10, torch.randn(1, 40, 1, 8) + 5
    k[0, 3] += 3
    weight = torch.randn(1, 40, 1, 8)

    def gradient(read, *arguments, **options):
        leaf, *others = (x.clone().requires_grad_() for x in arguments)
        mean = read(leaf, *others, torch.ones(1, 8), scale=0.25, **options).mean
        (mean * weight).sum().backward()
        return leaf.grad[0, 4:, 0].double()

    found = gradient(softmax_read, q, k, v, backend="plain")
    wanted = gradient(naive_softmax_read, q.double(), k.double(), v.double())
    assert ((found - wanted).norm(dim=-1) <= 1e-4 * wanted.norm(dim=-1)).all()


@pytest.mark.parametrize("seed", range(4))
def test_a_narrow_span_keeps_the_digits_of_the_temperatures_gradient(seed):
    torch.manual_seed(seed)
    q, k, beta = torch.randn(1, 127, 2, 16), torch.randn(1, 127, 2, 16), torch.rand(2, 8) + 1.5
    v, weight = torch.rand(1, 127, 2, 8) * 0.4 / beta, torch.randn(1, 127, 2, 8)

    def gradient(read, *arguments):
        *others, leaf = (x.clone().requires_grad_() for x in arguments)
        (read(*others, leaf).free_energy * weight).sum().backward()
        return leaf.grad.double()

    found = gradient(softmax_read, q, k, v, beta)
    wanted = gradient(naive_softmax_read, *(x.double() for x in (q, k, v, beta)))
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()
