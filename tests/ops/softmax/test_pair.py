"""The mean of some values and the free energy of others, in one read; and offsets that dwarf what values differ by."""

import pytest
import torch
from softmax_calls import softmax_call

from fem.functional import softmax_read
from fem.ops.softmax.kernel_read import kernel_read
from fem.ops.softmax.support import Support


@pytest.mark.parametrize(("mean", "free"), [(4, 4), (2, 6), (0, 5), (5, 0)])
@pytest.mark.parametrize(("size", "how"), [(1.0, {}), (1e-3, {"causal": False}), (100.0, {"window": 5})])
@pytest.mark.parametrize("backend", ["sdpa", "plain"])
def test_any_two_widths_are_read_and_differentiated_as_the_definition(mean, free, size, how, backend):
    q, k, v, f = (torch.randn(2, 17, heads, width) for heads, width in ((4, 8), (2, 8), (2, mean), (2, free)))
    found = []
    for form in (backend, "reference"):
        leaves = [x.clone().requires_grad_() for x in (q, k, v, torch.full((2, free), 1.5), size * f)]
        read = softmax_read(*leaves[:4], backend=form, free_values=leaves[4], **how)
        assert (read.mean.shape[-1], read.free_energy.shape[-1]) == (mean, free)
        found.append([*read, *torch.autograd.grad(sum(x.sin().sum() for x in read), leaves)])
    for got, wanted in zip(*found):
        torch.testing.assert_close(got, wanted.to(got.dtype), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("spread", [1.0, 300.0])
def test_a_stream_of_a_pair_equals_the_whole(spread):
    call = softmax_call(20, free=2, spread=spread).map(lambda x: x.float())
    with torch.no_grad():
        for got, wanted in zip(call.streamed(6, *[1] * 14), call.definition()):
            assert (got - wanted).abs().max() <= 5e-6 * (1 + spread)


def test_values_that_hardly_differ_from_100_have_the_gradient_of_beta():
    q, k, v = (torch.randn(1, 33, 2, width) for width in (8, 8, 4))
    v, beta = 100 + 1e-3 * v, torch.ones(2, 4)
    weight = torch.rand(1, 33, 2, 4)
    exact = [x.double().requires_grad_() for x in (q, k, v, beta)]
    wanted = softmax_read(*exact, backend="reference").free_energy
    (slope,) = torch.autograd.grad((wanted * weight).sum(), exact[3])
    whole = Support(True, 8**-0.5)
    for read in (softmax_read, lambda q, k, v, b: kernel_read(q, k, v, v, b, whole)):
        leaf = beta.clone().requires_grad_()
        free_energy = read(q, k, v, leaf).free_energy
        (got,) = torch.autograd.grad((free_energy * weight).sum(), leaf)
        assert (free_energy - wanted).abs().max() <= 1e-5
        assert (got - slope).abs().max() <= 1e-2 * slope.abs().max()  # 6.7 times its size at e785e87
