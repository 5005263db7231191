"""Widths, switches and names of the configuration."""

import dataclasses

import pytest
import torch
from layers import ABLATIONS

from fem import PRIORS, FreeEnergyMixer, FreeEnergyMixerConfig

PAPER_SIZES = [(256, 4), (512, 8), (768, 8)]
MATCHED = [{"prior_type": name} for name in PRIORS] + [{"prior_type": "softmax", "n_kv_head": 2}]
if "gla" in PRIORS:
    MATCHED += [{"prior_type": "gla", "decay": "channel"}, {"prior_type": "gla", "decay": "scalar"}]


@pytest.mark.parametrize("ablation", ABLATIONS)
@pytest.mark.parametrize("fields", MATCHED, ids=lambda fields: " ".join(map(str, fields.values())))
@pytest.mark.parametrize("width, heads", PAPER_SIZES)
def test_matched_layers_have_the_weights_of_attention(width, heads, fields, ablation):
    config = FreeEnergyMixerConfig.matched(n_embd=width, n_head=heads, **fields, **ABLATIONS[ablation])
    off = lambda config: abs(config.linear_weights / (4 * width**2) - 1)  # noqa: E731
    neighbours = [dataclasses.replace(config, fem_dim=config.fem_dim + step) for step in (-heads, heads)]
    assert off(config) <= min(map(off, neighbours))
    one_head_wider = abs(neighbours[1].linear_weights - config.linear_weights) / (4 * width**2)
    assert off(config) <= max(0.005, one_head_wider / 2)
    if fields["prior_type"] in ("softmax", "linear", "gla"):
        assert off(config) <= 0.005


@pytest.mark.parametrize("ablation", ABLATIONS)
@pytest.mark.parametrize("fields", MATCHED, ids=lambda fields: " ".join(map(str, fields.values())))
def test_the_report_counts_the_weights_that_exist(fields, ablation):
    config = FreeEnergyMixerConfig.matched(n_embd=64, n_head=4, bias=False, **fields, **ABLATIONS[ablation])
    layer = FreeEnergyMixer(config)
    report = layer.parameter_report()
    generators = ("beta.theta", "ssm.a", "ssm.d")  # no linear maps, outside the paper's count
    weights = sum(p.numel() for name, p in layer.named_parameters() if not name.endswith(generators))
    assert report["linear"] + report["conditioner"] == weights
    assert report["budget"] == 4 * 64**2
    assert sum(report["blocks"].values()) == sum(p.numel() for p in layer.parameters())


def test_the_default_is_the_papers_first_split():
    config = FreeEnergyMixerConfig(n_embd=512, n_head=8)
    assert (config.fem_dim, config.qk_dim) == (256, 512)
    balanced = FreeEnergyMixerConfig(n_embd=768, n_head=8, fem_ratio=2 / 3, p_t_to_fem_ratio=2.0)
    assert (balanced.fem_dim, balanced.qk_dim) == (512, 512)


def test_plain_attention_is_the_ablation_of_everything():
    config = FreeEnergyMixerConfig.matched(
        n_embd=64, n_head=4, use_conv=False, use_lse=False, use_temperature=False, use_outer_gate=False
    )
    assert (config.fem_dim, config.qk_dim) == (64, 64)


def test_temperature_switches_the_log_sum_exp_on():
    config = FreeEnergyMixerConfig(n_embd=64, n_head=4, use_lse=False)
    assert config.use_lse
    layer = FreeEnergyMixer(FreeEnergyMixerConfig(n_embd=64, n_head=4, use_temperature=False))
    assert layer.beta is None
    assert layer.gate.inner is None
    assert (layer.inspect(torch.randn(1, 5, 64)).beta == 1).all()


def test_the_authors_names_mean_ours():
    config = FreeEnergyMixerConfig(n_embd=64, n_head=4, softmax_backend="naive")
    assert config.backend == "plain"
    assert FreeEnergyMixerConfig(n_embd=64, n_head=4, softmax_backend="flash").backend == "sdpa"
    assert FreeEnergyMixerConfig(n_embd=64, n_head=4).mamba_normalize


def test_a_configuration_can_be_copied_with_a_change():
    config = FreeEnergyMixerConfig(n_embd=64, n_head=4, softmax_backend="naive")
    assert dataclasses.replace(config, dropout=0.1).backend == "plain"
    assert FreeEnergyMixerConfig(**dataclasses.asdict(config)) == config


def test_beta_starts_where_the_paper_says():
    layer = FreeEnergyMixer(FreeEnergyMixerConfig(n_embd=64, n_head=4, lambda_init=-3.0))
    torch.testing.assert_close(layer.beta(), torch.full((4, 8), 1.953), atol=1e-3, rtol=0)
    assert (layer.gate.inner.bias == -3).all()
    assert 0.015 < layer.value.weight.std() < 0.025
