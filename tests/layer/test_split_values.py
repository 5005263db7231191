"""Layers no wider than attention: split values, of which some channels read the mean and the others the free energy;
and F alone, L without T, of layers that read no mean.
"""

import pytest
import torch
from layers import FAMILIES, HEADS, WIDTH, make_layer, tokens

from fem import PRIORS, FreeEnergyMixer, FreeEnergyMixerConfig

PAIRED = [name for name, prior in PRIORS.items() if prior.takes_pairs]
KEEP = torch.tensor([[1, 0, 1, 1, 1, 0, 0, 1, 1, 1, 0, 1, 1], [0, 0, 0, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1]]).bool()
IDS = torch.tensor([[3, 3, 3, 4, 4, 4, 4, 3, 3, 3, 3, 3, 3], [1] * 13])


def in_both_ways(split, x, **marks):
    """What the split layer must give, from the paper's reading of all its channels."""
    whole = FreeEnergyMixer(FreeEnergyMixerConfig(n_embd=WIDTH, n_head=HEADS, prior_type=split.config.prior_type, **{
        name: getattr(split.config, name) for name in ("fem_dim", "causal", "use_conv", "conv_hidden")
    })).double()  # fmt: skip
    weights, d_f = split.state_dict(), split.config.free_width
    weights |= {name: x for name, x in whole.state_dict().items() if name.startswith("gate.inner")}
    weights["beta.theta"] = torch.nn.functional.pad(weights["beta.theta"], (split.config.value_width - d_f, 0))
    whole.load_state_dict(weights)
    reading = whole.inspect(x, **marks)
    u = torch.cat([reading.mean[..., :-d_f], reading.free_energy[..., -d_f:]], -1)
    return whole.output((reading.gate * u).flatten(-2))


@pytest.mark.parametrize("prior", PAIRED)
@pytest.mark.parametrize("share, causal", [(0.5, True), (0.25, False), (1.0, True)])
def test_the_last_channels_read_the_free_energy_and_the_others_the_mean(prior, share, causal):
    layer, x = make_layer(prior_type=prior, free_share=share, fem_dim=32, causal=causal), tokens()
    marks = {"attention_mask": KEEP, "segment_ids": IDS}
    torch.testing.assert_close(layer(x), in_both_ways(layer, x), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(layer(x, **marks)[KEEP], in_both_ways(layer, x, **marks)[KEEP], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("build", [FreeEnergyMixerConfig.slim, FreeEnergyMixerConfig.split])
def test_a_preset_without_gates_has_no_rank(build):
    off = {"use_temperature": False, "use_outer_gate": False}
    assert [build(n_embd=width, n_head=4).gate_rank for width in (64, 512)] == [4, 32]
    assert build(n_embd=64, n_head=4, **off).gate_rank is None


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
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)


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
