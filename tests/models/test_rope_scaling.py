"""Scaled rotary angles: those of transformers' Llama, the same in a cache, a checkpoint and an engine."""

import pytest
import torch
from layers import some_pairs
from small_models import lively, small_config, tokens
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from fem.models import FEMConfig, FEMForCausalLM

SCALED = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    | {"original_max_position_embeddings": 8},
}
LONGEST = 32  # of small_config
PLAIN = {"mixer": {"use_conv": False}}
KEYS = {"gla": {"prior_type": "gla"}, "softmax": PLAIN, "grouped": PLAIN | {"num_key_value_heads": 1}}


@pytest.mark.parametrize("kind, layer", some_pairs(SCALED, KEYS, 2))
def test_queries_and_keys_turn_by_the_angles_of_a_llama(kind, layer):
    rope = SCALED[kind] | {"rope_theta": 500.0}
    config = small_config(rope_parameters=rope, **KEYS[layer])
    prior = FEMForCausalLM(config).model.layers[0].mixer.prior
    heads, width = 2, prior.config.key_width
    sizes = {"hidden_size": heads * width, "num_attention_heads": heads, "max_position_embeddings": LONGEST}
    rotary = LlamaRotaryEmbedding(LlamaConfig(**sizes, rope_parameters=dict(rope)))
    x, position = torch.randn(1, LONGEST, heads, width), torch.arange(LONGEST)
    cos, sin = rotary(x, position[None])
    wanted, _ = apply_rotary_pos_emb(x.transpose(1, 2), x.transpose(1, 2), cos, sin)
    (got,) = prior.rotated((x,), position)
    torch.testing.assert_close(got.transpose(1, 2), wanted, rtol=1e-5, atol=1e-5)
    (unscaled,) = FEMForCausalLM(small_config(**KEYS[layer])).model.layers[0].mixer.prior.rotated((x,), position)
    assert (unscaled - got).abs().max() > 0.1


@pytest.mark.parametrize("kind, layer", some_pairs(SCALED, KEYS))
def test_a_scaled_model_says_the_same_token_by_token_reopened_and_in_an_engine(kind, layer, tmp_path):
    model = lively(FEMForCausalLM(small_config(rope_parameters=SCALED[kind], **KEYS[layer]))).eval()
    ids = tokens(2, 20)
    whole = model(ids).logits
    past, rows = None, []
    for piece in ids.split([13, 1, 6], 1):
        out = model(piece, past_key_values=past, use_cache=True)
        past, rows = out.past_key_values, [*rows, out.logits]
    torch.testing.assert_close(torch.cat(rows, 1), whole, rtol=1e-4, atol=1e-5)
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(FEMForCausalLM.from_pretrained(tmp_path).eval()(ids).logits, whole)
    unscaled = FEMForCausalLM(small_config(**KEYS[layer])).eval()
    unscaled.load_state_dict(model.state_dict())
    assert (unscaled(ids).logits - whole).abs().max() > 1e-3
    if layer != "gla":
        served = FEMForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa").eval()
        assert served.config._attn_implementation == "sdpa"
        torch.testing.assert_close(served(ids).logits, whole, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("inference", [False, True])
def test_frequencies_are_copied_to_a_device_once(inference, monkeypatch):
    model = FEMForCausalLM(small_config(rope_parameters=SCALED["yarn"], num_hidden_layers=1, **PLAIN)).eval()
    ids, made, make = tokens(1, 5), [], torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda *args, **kwargs: made.append(args) or make(*args, **kwargs))
    with torch.inference_mode(inference):
        expected = model(ids).logits.clone()
    assert len(made) == 1
    torch.testing.assert_close(model(ids).logits, expected)
    model(ids, labels=ids).loss.backward()
    assert len(made) == 1
    (kept,) = model.model.layers[0].mixer.prior._frequencies.values()
    assert not kept.is_inference()
    assert not any("frequencies" in name for name in model.state_dict())


def test_an_unscaled_theta_is_the_mixers():
    base = small_config(rope_parameters={"rope_theta": 500.0})
    assert base.mixer_configs() == small_config(mixer={"rope_theta": 500.0}).mixer_configs()
    assert FEMConfig.from_dict(base.to_dict()).mixer_configs() == base.mixer_configs()


YARN = SCALED["yarn"]


def rope(**angles):
    return {"rope_parameters": angles}


OVERRIDES = [
    (rope(rope_theta=500.0), rope(rope_theta=70.0), {"mixer": {"rope_theta": 70.0}}),
    ({"mixer": {"rope_theta": 500.0}}, rope(**YARN), rope(**YARN, rope_theta=500.0)),
    (rope(**YARN), rope(**YARN, rope_theta=70.0), rope(**YARN, rope_theta=70.0)),
    (rope(**YARN), {"rope_parameters": None}, {}),
    ({}, rope(**YARN), rope(**YARN)),
]


@pytest.mark.parametrize("saved, given, wanted", OVERRIDES)
def test_angles_given_to_from_pretrained_are_turned_by(saved, given, wanted, tmp_path):
    FEMForCausalLM(small_config(**saved)).save_pretrained(tmp_path)
    found = [layer.mixer.config for layer in FEMForCausalLM.from_pretrained(tmp_path, **given).model.layers]
    assert found == small_config(**wanted).mixer_configs()


def test_fields_given_to_from_pretrained_are_checked(tmp_path):
    small_config(layer_priors=["gla", "softmax"], rope_parameters=YARN).save_pretrained(tmp_path)
    for given, words in (
        ({"num_hidden_layers": 1}, "layer_priors must have one entry per layer"),
        ({"max_position_embeddings": "512"}, "max_position_embeddings must be"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_parameters must have a rope_type of"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            FEMConfig.from_pretrained(tmp_path, **given)
    assert FEMConfig.from_pretrained(tmp_path, use_cache=False).use_cache is False


def test_a_layer_without_rotation_stays_without():
    layers = ["mamba", {"use_rope": False}, "softmax"]
    config = small_config(rope_parameters=SCALED["yarn"], layer_priors=layers, num_hidden_layers=3)
    assert [mixer.rope_frequencies is None for mixer in config.mixer_configs()] == [True, True, False]
