"""The two gates of Eq. 10 and 11, by their definition."""

import pytest
import torch

from fem import FreeEnergyMixerConfig, gates
from fem.gates import TwoLevelGate
from fem.ops.common.read import Read


@pytest.mark.parametrize("gate_rank", [None, 3])
def test_the_gates_are_those_of_equations_10_and_11(gate_rank):
    config = FreeEnergyMixerConfig(n_embd=12, n_head=2, fem_dim=8, use_conv=False, gate_rank=gate_rank)
    gate = TwoLevelGate(config).double()
    x, mean, free_energy = (torch.randn(2, 5, *shape).double() for shape in ((12,), (2, 4), (2, 4)))
    out = gate(3 * x, Read(mean, free_energy))
    inner, outer = (part(3 * x).unflatten(-1, (2, 4)) for part in (gate.inner, gate.outer))
    lambda_, g = 1 / (1 + torch.exp(-inner)), torch.log(1 + torch.exp(outer))
    g = g / torch.sqrt((g * g).sum(-1, keepdim=True) / 4 + config.eps)
    torch.testing.assert_close(out, g * ((1 - lambda_) * mean + lambda_ * free_energy))
    with torch.no_grad():  # inference takes another path than training
        torch.testing.assert_close(gate(3 * x, Read(mean, free_energy)), out)


def test_the_gradients_of_the_gates_by_hand_are_the_true_ones_of_first_and_second_order():
    gate = TwoLevelGate(FreeEnergyMixerConfig(n_embd=6, n_head=2, fem_dim=6, use_conv=False, free_share=0.5)).double()
    x, mean, free_energy = (3 * torch.randn(2, *shape, dtype=torch.double) for shape in ((6,), (2, 2), (2, 1)))
    inputs = [leaf.requires_grad_() for leaf in (x, mean, free_energy)]
    mixed = lambda x, *read: gate(x, Read(*read))  # noqa: E731
    assert torch.autograd.gradcheck(mixed, inputs)
    assert torch.autograd.gradgradcheck(mixed, inputs)
    loss = mixed(*inputs).square().sum()
    once, again = (torch.autograd.grad(loss, inputs, retain_graph=True, create_graph=more) for more in (False, True))
    torch.testing.assert_close(again, once)


def test_a_kernel_is_asked_about_the_gates_own_parameters(monkeypatch):
    """Where only the gates are trained, neither the features nor what was read have a gradient."""
    asked = []
    monkeypatch.setattr(gates, "by_kernels", lambda *tensors, differentiable: asked.extend(tensors))
    gate = TwoLevelGate(FreeEnergyMixerConfig(n_embd=12, n_head=2, fem_dim=8, use_conv=False))
    out = gate(torch.randn(2, 5, 12), Read(*torch.randn(2, 2, 5, 2, 4)))
    assert [x.requires_grad for x in asked] == [False, False, True, True]
    assert out.requires_grad
