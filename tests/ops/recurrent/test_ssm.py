"""`ssm_read` alone: selective state space models. What it shares with `channel_scan_read` is in test_recurrences.py."""

from functools import partial

import pytest
import torch
from scan_reads import SHARED, compare, gradients_of, relative, scan_call, state_equation

from fem.functional import channel_scan_read, ssm_read
from fem.ops.ssm import ssm_read as ssm

check = partial(compare, wanted_of=state_equation, beta_unit=0.1)


@pytest.mark.parametrize("time", [63, 64, 65, 191])
def test_segments_of_any_number_give_the_state_equation(time):
    check(scan_call("ssm", time))


@pytest.mark.parametrize("name", ["delta", "B", "C", "D", "A"])
def test_zeros_have_the_exact_gradient(name):
    inputs = scan_call("ssm", 70)
    tensor = inputs.arguments[name]
    some = torch.rand_like(tensor) > 0.4
    if name not in SHARED:
        some[:, 0] = True  # a state that nothing entered yet has no scale to measure its gradient by
    check(inputs.set(**{name: tensor * some}))


@pytest.mark.parametrize("beta", [None, torch.ones(1, 1)])
def test_the_definition_has_the_gradient_of_a_skip_of_zero(beta):
    D, found = torch.zeros(1, 1, requires_grad=True), []
    column = lambda *x: torch.tensor(x).view(1, 2, 1, 1)  # noqa: E731
    for backend in ("auto", "reference"):
        ones = torch.ones(1, 2, 1)
        read = ssm_read(column(1.0, 1.0), -torch.ones(1, 1, 1), ones, ones, D, column(1.0, 3.0), beta, backend=backend)
        found.append(torch.autograd.grad((read.mean if beta is None else read.free_energy).sum(), D)[0])
    assert found[0] > 0.1
    torch.testing.assert_close(*found)


def test_a_row_without_weight_reads_zero_and_passes_no_gradient():
    inputs = scan_call("ssm", 9)
    c = inputs.arguments["C"].clone()
    c[:, 4] = 0
    mine = inputs.set(C=c, D=torch.zeros_like(inputs.arguments["D"])).leaves()
    read = mine.read()
    assert all((part[:, 4] == 0).all() for part in read)
    for gradient in gradients_of(mine, [part[:, 4:5] for part in read], [torch.ones(2, 1, 2, 3)] * 2).values():
        assert (gradient == 0).all()


def test_one_state_with_equal_rates_is_a_decay_per_channel():
    inputs = scan_call("ssm", 50)
    delta, v, beta = (inputs.arguments[name] for name in ("delta", "v", "beta"))
    ones, rate = torch.ones(2, 50, 1), -torch.rand(2, 3, 1)
    read = ssm_read(delta, rate, ones, ones, torch.zeros(2, 3), v, beta)
    for got, wanted in zip(read, channel_scan_read(delta.log(), v, beta, delta * rate[..., 0])):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def test_a_state_that_is_not_read_may_hold_a_spike():
    inputs = scan_call("ssm", 66)
    v, c = inputs.arguments["v"].clone(), inputs.arguments["C"].clone()
    v[:, 2] = 300.0
    c[:, 3:, 0] = 0  # the state that keeps the spike
    rate = inputs.arguments["A"].clone() - 30
    rate[..., 0] = 0.0
    mine = inputs.set(v=v, C=c, A=rate).leaves()
    got, wanted = mine.read(), mine.read(backend="reference")
    for one, other in zip(got, wanted):
        assert relative(one[:, 40:], other[:, 40:], 0.1) < 1e-5
    for gradient in gradients_of(mine, got, [torch.ones_like(part) for part in wanted]).values():
        assert gradient.isfinite().all()


def test_training_keeps_no_state_per_token():
    inputs = scan_call("ssm", 1024, batch=1).leaves()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        inputs.read()
    entries = sum(x.untyped_storage().nbytes() // x.element_size() for x in {x.data_ptr(): x for x in kept}.values())
    v = inputs.arguments["v"]
    rank = inputs.arguments["A"].shape[-1]
    assert entries < 16 * v.numel() + 3 * v.numel() * rank * v.shape[2] * v.shape[3] / ssm.SLAB_STATES
