"""Free energies that one attention call does not prove, computed again from their definition in float64."""

import pytest
import torch

from fem.functional import softmax_read
from fem.ops.softmax import recompute
from fem.ops.softmax.support import Pairs


def draw():
    q, k, v = torch.randn(2, 9, 4, 16), torch.randn(2, 9, 2, 16), torch.randn(2, 9, 2, 8)
    return q, k, v, torch.rand(2, 8) + 0.5


@pytest.mark.parametrize("numbers", [recompute._NUMBERS, 3 * 9 * 16])
@pytest.mark.parametrize("shape", [(2, 4, 9, 9), (1, 4, 1, 9), (1, 1, 9, 1), (2, 1, 1, 1)])
def test_recomputed_entries_have_the_gradients_of_the_definition(monkeypatch, shape, numbers):
    """All heads at once or three rows at once, where heads have unequally many rows and channels."""
    monkeypatch.setattr(recompute, "_NUMBERS", numbers)
    q, k, v, beta = draw()
    bias = torch.randn(shape)
    doubtful = torch.rand(2, 9, 4, 8) < torch.tensor([0.0, 0.02, 0.3, 0.9])[:, None]
    weight = torch.randn(2, 9, 4, 8)
    leaves = [x.double().requires_grad_() for x in (q, k, v, beta, bias)]
    pairs = Pairs.of(leaves[4], None, None, True, 16**-0.5)
    found = recompute.recompute(torch.zeros(2, 9, 4, 8).double(), doubtful, *leaves[:4], pairs)
    wanted = softmax_read(*leaves[:4], bias=leaves[4], backend="reference").free_energy
    torch.testing.assert_close(found[doubtful], wanted[doubtful], rtol=1e-9, atol=1e-9)
    both = [torch.autograd.grad((x * weight)[doubtful].sum(), leaves) for x in (found, wanted)]
    for own, other in zip(*both):
        torch.testing.assert_close(own, other, rtol=1e-8, atol=1e-8)
    forward = (doubtful.any(), doubtful, *(x.detach() for x in leaves), None, None, None, True, 16**-0.5)
    backward = (weight.double(), torch.tensor(True), *forward[1:])
    for declared, given in ((recompute._recompute, forward), (recompute._recompute_backward, backward)):
        torch.library.opcheck(declared, given, test_utils=("test_schema", "test_faketensor"))


def test_attention_alone_has_no_free_energy_to_compute_again():
    q, k, v, beta = draw()
    nothing = torch.empty(2, 9, 4, 0, dtype=torch.bool)
    found, _ = recompute._recompute(
        nothing.any(), nothing, q, k, v[..., :0], beta[:, :0], *Pairs.of(None, None, None, True, 0.25)
    )
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
