"""Free energies that one attention call does not prove, computed again from their definition in float64."""

import pytest
import torch

from fem.functional import softmax_read
from fem.ops.softmax import exact
from fem.ops.softmax.support import Support, bounds


def draw():
    q, k, v = torch.randn(2, 9, 4, 16), torch.randn(2, 9, 2, 16), torch.randn(2, 9, 2, 8)
    return q, k, v, torch.rand(2, 8) + 0.5


@pytest.mark.parametrize("numbers", [exact._NUMBERS, 3 * 2 * 9])
@pytest.mark.parametrize("shape", [(2, 4, 9, 9), (1, 4, 1, 9), (1, 1, 9, 1), (2, 1, 1, 1)])
def test_entries_in_doubt_have_the_values_and_gradients_of_the_definition(monkeypatch, shape, numbers):
    """All rows of a head at once or three, where heads have unequally many rows and channels."""
    monkeypatch.setattr(exact, "_NUMBERS", numbers)
    q, k, v, beta = draw()
    bias = torch.randn(shape)
    doubt = torch.rand(2, 9, 4, 8) < torch.tensor([0.0, 0.02, 0.3, 0.9])[:, None]
    weight = torch.randn(2, 9, 4, 8)
    leaves = [x.double().requires_grad_() for x in (q, k, v, beta, bias)]
    rules = Support(True, 16**-0.5, bias=leaves[4])
    free_energy = torch.randn(2, 9, 4, 8).double().requires_grad_()
    found = exact.exact_where(doubt, free_energy, *leaves[:4], rules)
    wanted = softmax_read(*leaves[:4], bias=leaves[4], backend="reference").free_energy
    torch.testing.assert_close(found[doubt], wanted[doubt], rtol=1e-9, atol=1e-9)
    assert torch.equal(found[~doubt], free_energy[~doubt])
    both = [torch.autograd.grad((x * weight)[doubt].sum(), leaves, retain_graph=True) for x in (found, wanted)]
    for own, other in zip(*both):
        torch.testing.assert_close(own, other, rtol=1e-8, atol=1e-8)
    (through,) = torch.autograd.grad((found * weight).sum(), free_energy)
    assert torch.equal(through, weight.double().masked_fill(doubt, 0))
    first, end = bounds(rules, 9, 9, torch.device("cpu"))
    given = (doubt, free_energy, leaves[0] * 16**-0.5, *leaves[1:4], None, first, end, leaves[4])
    given = [None if x is None else x.detach() for x in given]
    for some in (doubt, torch.zeros_like(doubt)):
        checks = ("test_schema", "test_faketensor")
        torch.library.opcheck(exact._in_graphs, (some, *given[1:]), test_utils=checks)


def test_attention_alone_has_no_free_energy_to_compute_again():
    q, k, v, beta = draw()
    nothing = torch.empty(2, 9, 4, 0)
    found = exact.exact_where(nothing.bool(), nothing, q, k, v[..., :0], beta[:, :0], Support(True, 0.25))
    assert found.shape == nothing.shape


@pytest.mark.parametrize("top", [400.0, 800.0, 1000.0, 1700.0])
def test_second_derivatives_of_values_hundreds_of_nats_apart_are_finite(top):
    """The first token's weight e^{beta (f - c)} is a number of float64 whose square may be none."""
    v = torch.tensor([0.0, top / 2, top]).view(1, 3, 1, 1).requires_grad_()
    q, beta = torch.zeros(1, 3, 1, 1), torch.ones(1, 1)
    results = []
    for backend in ("auto", "reference"):
        read = softmax_read(q, q, v, beta, backend=backend).free_energy
        (first,) = torch.autograd.grad(read.sum(), v, create_graph=True)
        results.append(torch.autograd.grad(first.square().sum(), v)[0])
    torch.testing.assert_close(*results)
