"""Derivatives of every kind through the layer: forward mode, per sample, second order, and a state's history."""

import pytest
import torch
from layers import FAMILIES, make_layer, tokens
from torch.func import functional_call, grad, jvp, vmap

families = pytest.mark.parametrize("family", FAMILIES)


def make(family):
    layer = make_layer(**FAMILIES[family])
    x = tokens(time=7)
    keep = torch.tensor([[1, 1, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 1]]).bool()
    ids = torch.tensor([[3, 3, 3, 3, 8, 8, 8]] * 2)
    loss = lambda p, x, keep, ids: functional_call(layer, p, (x, keep, ids))[keep].square().sum()  # noqa: E731
    return x, keep, ids, loss, {name: p.detach() for name, p in layer.named_parameters()}


@families
def test_forward_mode_is_the_slope(family):
    x, keep, ids, loss, weights = make(family)
    dx, dw = torch.randn_like(x), {name: torch.randn_like(p) for name, p in weights.items()}
    _, slope = jvp(lambda p, x: loss(p, x, keep, ids), (weights, x), (dw, dx))
    wanted = [p.requires_grad_() for p in (x, *weights.values())]
    gradients = torch.autograd.grad(loss(weights, x, keep, ids), wanted)
    wanted = sum((g * d).sum() for g, d in zip(gradients, (dx, *dw.values()), strict=True))
    torch.testing.assert_close(slope, wanted.detach(), rtol=1e-9, atol=1e-9)


@families
def test_gradients_per_sample_add_up(family):
    layer, x = make_layer(**FAMILIES[family]), tokens(time=7)
    weights = {name: p.detach() for name, p in layer.named_parameters()}
    of_row = lambda p, row: functional_call(layer, p, (row[None],)).square().sum()  # noqa: E731
    rows = vmap(grad(of_row), in_dims=(None, 0))(weights, x)
    layer(x).square().sum().backward()
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(rows[name].sum(0), parameter.grad, rtol=1e-9, atol=1e-9)


@families
def test_a_hessian_times_a_vector_is_the_slope_of_the_gradient(family):
    x, keep, ids, loss, weights = make(family)
    directions = {name: torch.randn_like(p) for name, p in weights.items()}

    def gradient(step, **how):
        moved = {name: (p + step * directions[name]).requires_grad_() for name, p in weights.items()}
        return moved, torch.autograd.grad(loss(moved, x, keep, ids), list(moved.values()), **how)

    here, first = gradient(0.0, create_graph=True)
    along = sum((g * d).sum() for g, d in zip(first, directions.values(), strict=True))
    second = torch.autograd.grad(along, list(here.values()))
    for got, up, down in zip(second, gradient(1e-6)[1], gradient(-1e-6)[1], strict=True):
        wanted = (up - down) / 2e-6
        assert (got - wanted).abs().max() <= 1e-6 * (1 + wanted.abs().max())


@families
def test_gradients_pass_through_a_state(family):
    layer, x = make_layer(**FAMILIES[family]), tokens().requires_grad_()
    _, state = layer(x[:, :6], return_state=True)
    rest = layer(x[:, 6:], state=state)[:, 1:]
    (through,) = torch.autograd.grad(rest.square().sum(), x)
    (whole,) = torch.autograd.grad(layer(x)[:, 7:].square().sum(), x)
    torch.testing.assert_close(through, whole, rtol=1e-8, atol=1e-8)
