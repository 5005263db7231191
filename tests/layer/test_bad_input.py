"""Bad input gets one sentence that names the argument, what was got and what is wanted."""

import pytest
import torch

from fem import FreeEnergyMixer, FreeEnergyMixerConfig
from fem.functional import softmax_read

pytestmark = pytest.mark.usefixtures("as_users_run")

CONFIGS = {
    "n_head does not divide": (ValueError, {"n_embd": 64, "n_head": 5}, "n_head must divide n_embd = 64"),
    "zero width": (ValueError, {"n_embd": 0}, "n_embd must be a positive integer, got 0"),
    "float heads": (ValueError, {"n_head": 4.0}, "n_head must be a positive integer, got 4.0"),
    "unknown prior": (ValueError, {"prior_type": "softmin"}, "prior_type must be one of softmax"),
    "unknown field": (TypeError, {"fem_ratoi": 0.5}, "no field 'fem_ratoi' .* did you mean 'fem_ratio'"),
    "far-off field": (TypeError, {"zzz": 1}, "no field 'zzz' .* known fields: n_embd"),
    "unknown backend": (ValueError, {"backend": "cuda"}, "backend must be one of .* got 'cuda'"),
    "two backends": (ValueError, {"backend": "sdpa", "softmax_backend": "naive"}, "give one"),
    "two normalisations": (ValueError, {"normalize": True, "mamba_normalize": False}, "give one"),
    "unknown decay": (ValueError, {"decay": "token"}, "decay must be one of scalar, head, channel"),
    "fem_dim": (ValueError, {"fem_dim": 30}, "fem_dim must be a multiple of 4, got 30"),
    "odd keys under RoPE": (ValueError, {"qk_dim": 12}, "qk_dim must be a multiple of 8 .*RoPE"),
    "grouped heads": (ValueError, {"n_kv_head": 3}, "n_kv_head must divide n_head = 4, got 3"),
    "window": (ValueError, {"window": 0}, "window must be a positive integer, got 0"),
    "window without softmax": (ValueError, {"window": 4, "prior_type": "linear"}, "window needs prior_type='softmax'"),
    "unnormalised softmax": (ValueError, {"normalize": False}, "normalize=False is for scan priors"),
    "the future in a causal conditioner": (ValueError, {"conv_bidirectional": True}, "needs causal=False"),
    "odd halves": (
        ValueError,
        {"causal": False, "conv_bidirectional": True, "conv_hidden": 9},
        "must be even, got 9",
    ),
    "dropout": (ValueError, {"dropout": 1.0}, r"dropout must lie in \[0, 1\), got 1.0"),
    "cap": (ValueError, {"value_logexp_cap": -1.0}, "value_logexp_cap must be positive, got -1.0"),
    "rope_theta": (ValueError, {"rope_theta": 0}, "rope_theta must be positive, got 0"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_configurations(case):
    error, fields, message = CONFIGS[case]
    with pytest.raises(error, match=message):
        FreeEnergyMixerConfig(**{"n_embd": 64, "n_head": 4} | fields)


def test_matched_solves_the_widths_itself():
    with pytest.raises(ValueError, match="matched solves the widths; leave out fem_dim"):
        FreeEnergyMixerConfig.matched(n_embd=64, n_head=4, fem_dim=32)


X = torch.zeros(2, 6, 64)
CALLS = {
    "width": (ValueError, {"x": torch.zeros(2, 6, 32)}, r"x must have shape .*n_embd = 64.*got \(2, 6, 32\)"),
    "no batch": (ValueError, {"x": torch.zeros(6, 64)}, r"x must have shape .*got \(6, 64\)"),
    "float mask": (TypeError, {"attention_mask": torch.ones(2, 6)}, "attention_mask must be bool or integers"),
    "mask shape": (
        ValueError,
        {"attention_mask": torch.ones(2, 5, dtype=torch.bool)},
        r"attention_mask must have shape .*\(2, 6\), got \(2, 5\)",
    ),
    "mask values": (ValueError, {"attention_mask": torch.full((2, 6), 2)}, "attention_mask must hold 0 and 1 alone"),
    "four-dimensional mask": (
        ValueError,
        {"attention_mask": torch.ones(2, 1, 6, 6).bool()},
        "attention_mask must have",
    ),
    "float ids": (TypeError, {"segment_ids": torch.zeros(2, 6)}, "segment_ids must be integers"),
    "ids shape": (ValueError, {"segment_ids": torch.zeros(2, 7).long()}, "segment_ids must have shape"),
}


@pytest.mark.parametrize("case", CALLS)
def test_calls_of_the_layer(case):
    error, fields, message = CALLS[case]
    layer = FreeEnergyMixer(FreeEnergyMixerConfig(n_embd=64, n_head=4))
    with pytest.raises(error, match=message):
        layer(**{"x": X} | fields)


def state_of(rows=2, dtype=torch.float32, **fields):
    layer = FreeEnergyMixer(FreeEnergyMixerConfig(**{"n_embd": 64, "n_head": 4} | fields)).to(dtype)
    return layer(torch.zeros(rows, 3, 64, dtype=dtype), return_state=True)[1]


STATES = {
    "layer": (lambda: state_of(n_head=2), "state belongs to another layer"),
    "conditioner": (lambda: state_of(use_conv=False), "state belongs to another layer"),
    "batch": (lambda: state_of(rows=3), "another batch size: it has 3, this call has 2"),
    "dtype": (lambda: state_of(dtype=torch.float64), "another input dtype: it has torch.float64"),
    "device": (lambda: state_of().to("meta"), "another device: it has meta, this call has cpu"),
}


@pytest.mark.parametrize("case", STATES)
def test_states_of_others_are_refused(case):
    make, message = STATES[case]
    layer = FreeEnergyMixer(FreeEnergyMixerConfig(n_embd=64, n_head=4))
    with pytest.raises(ValueError, match=message):
        layer(X, state=make())


@pytest.mark.parametrize("given", [{"return_state": True}, {"state": "a state"}])
def test_a_layer_that_sees_the_future_has_no_state(given):
    layer = FreeEnergyMixer(FreeEnergyMixerConfig(n_embd=64, n_head=4, causal=False))
    with pytest.raises(ValueError, match="causal=False"):
        layer(X, **{name: state_of() if name == "state" else value for name, value in given.items()})


def read(**changes):
    torch.manual_seed(0)
    fields = {"q": torch.randn(1, 5, 2, 4), "k": torch.randn(1, 5, 2, 4), "v": torch.randn(1, 5, 2, 3)}
    return softmax_read(**fields | {"beta": torch.ones(2, 3)} | changes)


READS = {
    "NaN beta": (ValueError, {"beta": torch.tensor([[1.0, float("nan"), 1], [1, 1, 1]])}, "beta must"),
    "zero beta": (ValueError, {"beta": torch.zeros(2, 3)}, "beta must"),
    "beta shape": (ValueError, {"beta": torch.ones(3)}, "beta must"),
    "key length": (ValueError, {"k": torch.randn(1, 6, 2, 4)}, "k|v"),
    "key width": (ValueError, {"k": torch.randn(1, 5, 2, 3)}, "k"),
    "more queries than keys": (ValueError, {"q": torch.randn(1, 7, 2, 4)}, "causal"),
    "window": (ValueError, {"window": 0}, "window must"),
    "float key mask": (TypeError, {"key_mask": torch.ones(1, 5)}, "key_mask must be bool or integers"),
    "bool bias": (TypeError, {"bias": torch.ones(1, 2, 5, 5).bool()}, "bias must"),
    "bias shape": (ValueError, {"bias": torch.zeros(1, 3, 5, 5)}, "bias must"),
    "backend": (ValueError, {"backend": "magic"}, "backend must be one of"),
}


@pytest.mark.parametrize("case", READS)
def test_calls_of_the_read(case):
    error, fields, message = READS[case]
    with pytest.raises(error, match=message):
        read(**fields)
