"""Reading a memory or a set: the definition, masks, order, empty sets, gradients."""

import math

import pytest
import torch
from layers import ABLATIONS, stirred

from fem import FreeEnergyCrossMixer, FreeEnergyPooling

ROWS = {name: fields for name, fields in ABLATIONS.items() if "use_conv" not in fields}
ROWS |= {"slim": {"gate_rank": 2}, "gates per head": {"gate_rank": 0}, "grouped": {"n_kv_head": 1}}
MASK = torch.tensor([[1, 0, 1, 1, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]])


def cross(memory_dim=6, seed=0, **fields) -> FreeEnergyCrossMixer:
    torch.manual_seed(seed)
    return stirred(FreeEnergyCrossMixer(8, 2, memory_dim, **fields).double(), 0.3)


def inputs(seed=1):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    return draw(3, 4, 8), draw(3, 5, 6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e20])
def test_a_bad_number_in_one_row_leaves_the_others_alone_where_queries_are_as_many_as_keys(bad):
    layer, (_, memory) = cross(), inputs()
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    spoilt = memory.clone()
    spoilt[1, 2, 3] = bad
    clean, found = layer(x, memory, MASK), layer(x, spoilt, MASK)
    torch.testing.assert_close(found[[0, 2]], clean[[0, 2]], rtol=1e-9, atol=1e-9)


def test_tables_of_a_read_across_are_its_prior_and_posterior():
    layer, (x, memory) = cross(n_kv_head=1), inputs()
    keep = MASK.bool()
    reading = layer.inspect(x, memory, keep)
    v = layer.value(memory).unflatten(-1, (1, -1))[:, :, 0]
    torch.testing.assert_close(torch.einsum("bhti,bid->bthd", reading.prior, v), reading.mean)
    assert (reading.prior * ~keep[:, None, None]).abs().max() == 0
    weights = reading.prior[:, :, None] * (reading.beta[:, :, None, None] * v.mT[:, None, :, None]).exp()
    torch.testing.assert_close(reading.beta, layer.beta().expand_as(reading.beta))
    seen = keep.any(-1)
    torch.testing.assert_close(reading.posterior[seen], (weights / weights.sum(-1, keepdim=True))[seen])
    pool = FreeEnergyPooling(8, 2, 3)
    assert pool.inspect(torch.zeros(2, 5, 8)).prior.shape == (2, 2, 3, 5)
    assert {"query", "read.value.weight"} & pool.no_weight_decay() == {"query"}


def by_definition(layer, x, memory, keep):
    """Eq. 4, 7 and 11 by torch's operations."""
    config, seen = layer.config, keep.bool()[:, None, None]
    groups = config.n_head // config.kv_heads
    k, v = (
        part(memory).unflatten(-1, (config.kv_heads, -1)).transpose(1, 2).repeat_interleave(groups, 1)
        for part in (layer.key, layer.value)
    )
    scores = layer.query(x).unflatten(-1, (config.n_head, -1)).transpose(1, 2) @ k.mT / math.sqrt(config.key_width)
    p = scores.masked_fill(~seen, -math.inf).softmax(-1)
    lam, gate = (1.0 if f is None else f.transpose(1, 2) for f in layer.gate.factors(x))
    u = p @ v
    if config.use_lse:
        beta = torch.ones(config.kv_heads, 1) if layer.beta is None else layer.beta()
        beta = beta.repeat_interleave(groups, 0)[:, None]
        u = (1 - lam) * u + lam * (p @ (beta * v).exp()).log() / beta
    return layer.output((gate * u).where(seen.any(-1, keepdim=True), 0).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("row", ROWS)
def test_a_read_across_is_its_definition(row):
    layer, (x, memory) = cross(**ROWS[row]), inputs()
    for mask in (None, MASK):
        keep = torch.ones_like(MASK) if mask is None else mask
        torch.testing.assert_close(layer(x, memory, mask), by_definition(layer, x, memory, keep), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("row", ["C,L,T,G", "gates per head", "grouped", "-T", "-G,T,L"])
def test_gradients_of_a_read_across_match_finite_differences(row):
    layer, (x, memory) = cross(**ROWS[row]), inputs()
    x.requires_grad_(), memory.requires_grad_()
    assert torch.autograd.gradcheck(lambda *x: layer(*x, MASK[:1]), (x[:1, :2], memory[:1]))
    wanted = [x, memory, *layer.parameters()]
    loss = lambda: layer(x, memory, MASK).square().sum()  # noqa: E731
    gradients = (torch.autograd.grad(loss(), wanted, create_graph=create) for create in (True, False))
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-9)
    layer(x, memory, MASK).square().sum().backward()
    assert [name for name, p in layer.named_parameters() if p.grad is None or not p.grad.any()] == []
    assert memory.grad[~MASK.bool()].abs().max() == 0


def test_what_stands_in_masked_elements_reaches_nothing_and_no_elements_are_an_empty_set():
    layer, (x, memory) = cross(), inputs()
    spoilt = memory.masked_fill(~MASK.bool()[..., None], torch.nan).requires_grad_()
    y = layer(x, spoilt, MASK)
    torch.testing.assert_close(y, layer(x, memory, MASK))
    y.sum().backward()
    assert all(part.grad.isfinite().all() for part in (spoilt, *layer.parameters()))
    torch.testing.assert_close(layer(x, memory[:, :0]), layer.output.bias.expand(3, 4, 8))


def test_pooling_is_a_read_of_learnt_queries():
    torch.manual_seed(0)
    layer, x = FreeEnergyPooling(8, 2, queries=3, memory_dim=5), torch.randn(2, 7, 5)
    torch.testing.assert_close(layer(x)[1], layer.read(layer.query[None], x[1:])[0])
    layer(x).square().sum().backward()
    assert layer.query.grad.abs().max() > 0


def test_pooling_follows_the_largest_element_as_beta_grows():
    """With even weights, lambda = 1 and no gate, a channel's pool goes from its mean to its maximum."""
    layer = FreeEnergyPooling(4, 2, lambda_init=50.0, use_outer_gate=False, fem_dim=4, qk_dim=4).double()
    x = torch.randn(1, 9, 4, dtype=torch.float64)
    with torch.no_grad():
        for part in (layer.read.query, layer.read.key):
            part.weight.zero_()
        for part in (layer.read.value, layer.read.output):
            part.weight.copy_(torch.eye(4))
        layer.read.beta.theta.fill_(1000.0)
    torch.testing.assert_close(layer(x)[:, 0], x.amax(1), atol=3e-3, rtol=0)
    with torch.no_grad():
        layer.read.beta.theta.fill_(-12.0)
    torch.testing.assert_close(layer(x)[:, 0], x.mean(1), atol=1e-4, rtol=0)


def test_pooling_has_the_weights_of_attention():
    layer = FreeEnergyPooling(64, 4)
    maps = sum(p.numel() for name, p in layer.read.named_parameters() if name.endswith("weight"))
    assert maps == pytest.approx(4 * 64**2, rel=5e-3)
