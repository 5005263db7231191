"""Layers whose channels read F alone, L without T: they read no mean, and no wider than attention."""

import pytest
import torch
from layers import FAMILIES, make_layer, tokens

from fem import PRIORS, FreeEnergyMixerConfig

BY_CHANNEL = [name for name, fields in FAMILIES.items() if PRIORS[fields["prior_type"]].takes_pairs]  # a cap needs it


def pair(family, **fields):
    """The layer, and one of its weights whose channels are read in pairs of mean and F."""
    alone = make_layer(**FAMILIES[family], use_temperature=False, **fields)
    both = make_layer(**FAMILIES[family], use_temperature=False, **fields)
    both.load_state_dict(alone.state_dict())
    both.pair = both.parts
    return alone, both


@pytest.mark.parametrize("family, cap", [*((name, None) for name in FAMILIES), *((name, 0.5) for name in BY_CHANNEL)])
def test_f_alone_is_f_beside_the_mean(family, cap):
    layers, x = pair(family, value_logexp_cap=cap), tokens()
    mask = torch.rand(x.shape[:2]) > 0.3
    found = []
    for layer in layers:
        y = layer(x, attention_mask=mask)
        found.append([y, *torch.autograd.grad(y.square().sum(), list(layer.parameters()))])
    for one, other in zip(*found):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_inspect_shows_the_mean_that_is_not_read():
    layer, both = pair("softmax")
    reading = layer.inspect(tokens())
    torch.testing.assert_close(reading.mean, both.inspect(tokens()).mean)
    assert reading.gap.shape == reading.mean.shape


def test_matched_widths_do_not_change():
    fields = {"n_embd": 64, "n_head": 4, "use_conv": False, "use_temperature": False}
    alone, share = (FreeEnergyMixerConfig.matched(**fields, **more) for more in ({}, {"free_share": 1.0}))
    assert (alone.fem_dim, alone.qk_dim) == (share.fem_dim, share.qk_dim)
    assert alone.read_width == alone.value_width
