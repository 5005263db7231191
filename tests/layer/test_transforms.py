"""Derivatives of every kind through the layer: forward mode, per sample, second order, and a state's history."""

import pytest
import torch
from layers import EVERY, FAMILIES, make_layer, some_pairs, streamed, tokens
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jvp, stack_module_state, vmap

families = pytest.mark.parametrize("family", FAMILIES)


def make(family):
    layer, x = make_layer(**EVERY.get(family, {"value_logexp_cap": 0.3})), tokens(time=7)
    keep = torch.tensor([[1, 1, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 1]]).bool()
    ids = torch.tensor([[3, 3, 3, 3, 8, 8, 8]] * 2)
    loss = lambda p, x, keep, ids: functional_call(layer, p, (x, keep, ids))[keep].square().sum()  # noqa: E731
    return x, keep, ids, loss, {name: p.detach() for name, p in layer.named_parameters()}


@families
def test_forward_mode_is_the_slope(family):
    x, keep, ids, loss, weights = make(family)
    dx, dw = torch.randn_like(x), {name: torch.randn_like(p) for name, p in weights.items()}
    _, slope = jvp(lambda p, x: loss(p, x, keep, ids), (weights, x), (dw, dx))
    leaves = [p.requires_grad_() for p in (x, *weights.values())]
    gradient, *gradients = torch.autograd.grad(loss(weights, x, keep, ids), leaves)
    along = sum((g * d).sum() for g, d in zip(gradients, dw.values(), strict=True))
    torch.testing.assert_close(slope, along + (gradient * dx).sum(), rtol=1e-9, atol=1e-9)
    with forward_ad.dual_level():  # without torch.func, and tangents of weights alone
        moved = {name: forward_ad.make_dual(p, dw[name]) for name, p in weights.items()}
        slope = forward_ad.unpack_dual(loss(moved, x, keep, ids)).tangent
    torch.testing.assert_close(slope, along, rtol=1e-9, atol=1e-9)


@pytest.mark.slow  # torch traces every operation
@pytest.mark.parametrize("family", ["softmax grouped", "gla"])
def test_a_linearised_layer_has_its_slope(family):
    x, keep, ids, loss, weights = make(family)
    x, keep, ids = (given[:, :3] for given in (x, keep, ids))
    dx = torch.randn_like(x)
    _, along = torch.func.linearize(lambda x: loss(weights, x, keep, ids), x)
    torch.testing.assert_close(along(dx), jvp(lambda x: loss(weights, x, keep, ids), (x,), (dx,))[1])


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
def test_a_first_call_under_transforms_leaves_nothing_in_the_layer(family):
    layer, x = make_layer(**FAMILIES[family]), tokens(time=7)
    loss = lambda x: layer(x).square().sum()  # noqa: E731
    found = jvp(grad(loss), (x,), (x,))[1]
    later = grad(loss)(x)
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(loss(x), x, create_graph=True)
    torch.testing.assert_close(later, gradient, rtol=1e-9, atol=1e-9)
    (wanted,) = torch.autograd.grad((gradient * x.detach()).sum(), x)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("family", [*EVERY, "capped"])
def test_a_hessian_times_a_vector_is_the_slope_of_the_gradient(family):
    x, keep, ids, loss, weights = make(family)
    directions = {name: torch.randn_like(p) for name, p in weights.items()}

    def gradient(step, **how):
        moved = {name: (p + step * directions[name]).requires_grad_() for name, p in weights.items()}
        return moved, torch.autograd.grad(loss(moved, x, keep, ids), list(moved.values()), **how)

    here, first = gradient(0.0, create_graph=True)
    torch.testing.assert_close(first, gradient(0.0)[1], rtol=1e-9, atol=1e-9)
    along = sum((g * d).sum() for g, d in zip(first, directions.values(), strict=True))
    second = torch.autograd.grad(along, list(here.values()))
    for got, up, down in zip(second, gradient(1e-6)[1], gradient(-1e-6)[1], strict=True):
        wanted = (up - down) / 2e-6
        assert (got - wanted).abs().max() <= 1e-6 * (1 + wanted.abs().max())


MODES = (torch.enable_grad, torch.no_grad)


@families
def test_gradients_pass_through_a_state(family):
    layer, x = make_layer(**FAMILIES[family]), tokens().requires_grad_()
    _, state = layer(x[:, :6], return_state=True)
    rest = layer(x[:, 6:], state=state)[:, 1:]
    (through,) = torch.autograd.grad(rest.square().sum(), x)
    (whole,) = torch.autograd.grad(layer(x)[:, 7:].square().sum(), x)
    torch.testing.assert_close(through, whole, rtol=1e-8, atol=1e-8)


def stream(layer, weights, x):
    """The layer over a prompt, then token by token, then the rest."""
    return streamed(lambda part, **how: functional_call(layer, weights, (part,), how), x, [3, 1, 1, 2])[0]


@pytest.mark.parametrize(
    "family, how", some_pairs(FAMILIES, [(width, mode) for width in (None, 16) for mode in MODES], 4)
)
def test_forward_mode_passes_through_a_state(family, how):
    width, mode = how
    layer, x = make_layer(**FAMILIES[family], fem_dim=width), tokens(time=7)
    weights = {name: p.detach() for name, p in layer.named_parameters()}
    directions = {name: torch.randn_like(p) for name, p in weights.items()}, torch.randn_like(x)
    _, wanted = jvp(lambda p, x: functional_call(layer, p, (x,)), (weights, x), directions)
    with mode():
        _, got = jvp(lambda p, x: stream(layer, p, x), (weights, x), directions)
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)


@families
def test_an_ensemble_of_layers_reads_streams_and_a_tokenizers_masks(family):
    layers, x = [make_layer(seed=seed, **FAMILIES[family]) for seed in (0, 1)], tokens(time=7)
    weights, _ = stack_module_state(layers)
    masks = torch.tensor([[[1, 1, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 0, 1]], [[1] * 7, [0, 0, 1, 1, 1, 1, 1]]])
    with torch.no_grad():
        streamed = vmap(lambda p: stream(layers[0], p, x))(weights)
        masked = vmap(lambda p, mask: functional_call(layers[0], p, (x, mask)))(weights, masks)
    for layer, mask, alone, read in zip(layers, masks, streamed, masked, strict=True):
        torch.testing.assert_close(alone, layer(x), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(read[mask.bool()], layer(x, mask)[mask.bool()], rtol=1e-9, atol=1e-9)
