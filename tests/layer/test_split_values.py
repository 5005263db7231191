"""Split values: some channels of a head read the mean, the others the free energy, in one read of attention's width."""

import pytest
import torch
from layers import HEADS, WIDTH, make_layer, tokens

from fem import PRIORS, FreeEnergyMixer, FreeEnergyMixerConfig

PAIRED = [name for name, prior in PRIORS.items() if prior.takes_pairs]
paired = pytest.mark.parametrize("prior", PAIRED)
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


@paired
@pytest.mark.parametrize("share, causal", [(0.5, True), (0.25, False), (1.0, True)])
def test_the_last_channels_read_the_free_energy_and_the_others_the_mean(prior, share, causal):
    layer, x = make_layer(prior_type=prior, free_share=share, fem_dim=32, causal=causal), tokens()
    marks = {"attention_mask": KEEP, "segment_ids": IDS}
    torch.testing.assert_close(layer(x), in_both_ways(layer, x), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(layer(x, **marks)[KEEP], in_both_ways(layer, x, **marks)[KEEP], rtol=1e-9, atol=1e-9)


@paired
def test_inspect_shows_split_values(prior):
    layer, x = make_layer(prior_type=prior, free_share=0.5), tokens()
    reading, d_f = layer.inspect(x), layer.config.free_width
    assert reading.mean.shape[-1] == layer.config.value_width - d_f
    assert reading.free_energy.shape[-1] == reading.hidden_beta.shape[-1] == reading.posterior.shape[2] == d_f
    assert reading.lambda_ is None
    torch.testing.assert_close(reading.posterior.sum(-1), torch.ones_like(reading.posterior[..., 0]))


@pytest.mark.parametrize("build", [FreeEnergyMixerConfig.slim, FreeEnergyMixerConfig.split])
def test_a_preset_without_gates_has_no_rank(build):
    off = {"use_temperature": False, "use_outer_gate": False}
    assert [build(n_embd=width, n_head=4).gate_rank for width in (64, 512)] == [4, 32]
    assert build(n_embd=64, n_head=4, **off).gate_rank is None
