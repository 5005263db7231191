"""TDC: the recurrence itself, at any length."""

import math

import pytest
import torch
import torch.nn.functional as F
from layers import HEADS, WIDTH, make_layer, tokens
from naive_conditioner import naive_conditioner
from torch import nn

from fem import FreeEnergyMixerConfig
from fem.conditioner import TimeDecayConditioner
from fem.config import CONDITIONERS
from fem.ops.common.tokens import Tokens, read_tokens
from fem.ops.conditioner.plain_conditioner import ConvForm, plain_condition


def make(dtype=torch.float64, **fields):
    torch.manual_seed(0)
    conditioner = TimeDecayConditioner(FreeEnergyMixerConfig(n_embd=WIDTH, n_head=4, **fields)).to(dtype)
    with torch.no_grad():
        conditioner.project.weight.normal_(std=0.5)
    return conditioner


def said(conditioner, x, tokens):
    """h, which stands behind x."""
    features, _ = conditioner(x, tokens)
    assert torch.equal(features[..., :WIDTH], x)
    return features[..., WIDTH:]


def by_loop(conditioner, x):
    """The definition, in float64."""
    double = lambda part: (part.weight.double(), part.bias.double())  # noqa: E731
    normed = F.layer_norm(x.double(), x.shape[-1:], *double(conditioner.norm_in))
    return naive_conditioner(F.linear(normed, *double(conditioner.project)), *double(conditioner.norm))[0]


@pytest.mark.parametrize("form", CONDITIONERS)
def test_the_plain_form_is_the_definition(form):
    projected, hidden = torch.randn(2, 23, 3 * 5, dtype=torch.float64), torch.randn(2, 5, dtype=torch.float64)
    keep, start = torch.rand(2, 23) > 0.3, torch.rand(2, 23) > 0.8
    norm = nn.LayerNorm(5).double()
    nn.init.normal_(norm.weight), nn.init.normal_(norm.bias)
    found = plain_condition(projected, Tokens(keep, start & keep, None, None), hidden, norm, ConvForm.named(form, 5))
    wanted = naive_conditioner(projected, norm.weight, norm.bias, keep, start & keep, hidden, form=form)
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)


def test_it_is_exact_over_8192_tokens():
    conditioner, x = make(torch.float32), torch.randn(1, 8192, WIDTH)
    tokens, _ = read_tokens((1, 8192), x.device)
    h, wanted = said(conditioner, x, tokens), by_loop(conditioner, x)
    assert (h - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def test_half_of_a_bidirectional_one_runs_backwards():
    conditioner = make(causal=False, conv_bidirectional=True)
    x = torch.randn(1, 11, WIDTH, dtype=torch.float64)
    tokens, _ = read_tokens((1, 11), x.device)
    changed = x.clone()
    changed[:, 8] = torch.randn(WIDTH)
    moved = (said(conditioner, changed, tokens) - said(conditioner, x, tokens)).abs().amax((0, 2))
    assert (moved > 1e-8).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_shut_conditioner_is_finite(dtype):
    """In float16 softplus(-20) is 0, and so is what keeps a norm from being 0."""
    conditioner = make(torch.float32)
    with torch.no_grad():
        conditioner.project.bias[-conditioner.norm.normalized_shape[0] :] = -20.0
    x = torch.randn(2, 5, WIDTH)
    features, _ = conditioner.to(dtype)(x.to(dtype), read_tokens((2, 5), x.device, None, None)[0])
    assert features.isfinite().all()


def test_a_streamed_conditioner_of_bfloat16_carries_float32():
    """Rounded at each token, a sum of 700 tokens that hardly decays errs by several times what one call does."""
    conditioner = make(torch.float32)
    with torch.no_grad():
        conditioner.project.bias[: conditioner.norm.normalized_shape[0]] = -8.0
    x = torch.randn(1, 700, WIDTH).bfloat16()
    conditioner, hidden = conditioner.bfloat16(), None
    _, whole = conditioner(x, read_tokens((1, 700), x.device)[0])
    with torch.no_grad():
        for token in x.split(1, 1):
            _, hidden = conditioner(token, read_tokens((1, 1), x.device)[0], hidden)
    assert hidden.dtype == torch.float32
    torch.testing.assert_close(hidden, whole, rtol=1e-2, atol=1e-2)


def by_definition(layer, x):
    """A softmax layer without positions, full gates and all: Eq. 4, 7, 11, 33, 34a and 34b by torch's operations."""
    h = by_loop(layer.conditioner, x)
    heads = lambda z: z.unflatten(-1, (HEADS, -1)).transpose(1, 2)  # noqa: E731
    heard = lambda part: heads(F.linear(torch.cat([x, h], -1), part.weight, part.bias))  # noqa: E731
    q, k, inner, outer = map(heard, (layer.prior.query, layer.prior.key, layer.gate.inner, layer.gate.outer))
    v = heads(F.linear(x, layer.value.weight, layer.value.bias) * (1 + F.linear(h, layer.value_scale.weight)))
    hidden = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
    p = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(hidden, -math.inf).softmax(-1)
    beta = torch.log1p((layer.beta.theta + layer.config.beta_max_init).exp())[:, None]
    lam, g = 1 / (1 + torch.exp(-inner)), torch.log1p(outer.exp())
    g = g / (g.square().mean(-1, keepdim=True) + layer.config.eps).sqrt()
    u = (1 - lam) * (p @ v) + lam * (p @ (beta * v).exp()).log() / beta
    return F.linear((g * u).transpose(1, 2).flatten(2), layer.output.weight, layer.output.bias)


def test_every_map_hears_it_and_the_layer_is_the_papers():
    layer, x = make_layer(use_rope=False), tokens()
    torch.testing.assert_close(layer(x), by_definition(layer, x), rtol=1e-9, atol=1e-9)
