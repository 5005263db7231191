"""Fresh mixers in the places of attentions: what they read off masks, calls and caches, and what is refused."""

from __future__ import annotations

import pytest
import torch
import transformers
from originals import DECODER, PADDED, TEXT, bert, close, decoder, lively
from small_models import awake, tokens

from fem import PRIORS, FreeEnergyMixer, replace_attention


def configs_of(model):
    """Those of its fresh mixers."""
    return [module.config for module in model.modules() if isinstance(module, FreeEnergyMixer)]


@pytest.mark.parametrize("fields", [{}, {"use_rope": False}], ids=str)
@pytest.mark.parametrize("prior", PRIORS)
def test_fresh_mixers_of_any_prior_replace_an_attention_with_another_base(prior, fields):
    """Llama 3 turns by 5e5: only a mixer that turns reads it."""
    model = decoder("llama")
    model.config.rope_parameters["rope_theta"] = 5e5
    replace_attention(model, prior, preserve=False, **fields)
    turned = "rope_theta" in PRIORS[prior].uses and not fields
    assert {config.rope_theta for config in configs_of(model)} == {5e5 if turned else 1e4}


def test_a_fresh_decoder_is_causal_where_only_is_decoder_says_so_and_its_encoder_is_not():
    sizes = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "num_experts": 2, "vocab_size": 64}
    sizes |= {f"{side}_{what}": 2 for side in ("encoder", "decoder") for what in ("attention_heads", "ffn_dim")}
    model = transformers.NllbMoeForConditionalGeneration(transformers.NllbMoeConfig(**sizes)).eval()
    replace_attention(model, preserve=False)
    ids = torch.arange(3, 9)[None]
    later = ids.clone()
    later[:, -1] += 9
    logits = (model(input_ids=ids, decoder_input_ids=other).logits for other in (ids, later))
    close(*(x[:, :-1] for x in logits), 1e-6)
    assert [config.causal for config in configs_of(model)] == [False] * 2 + [True] * 2


REPLACED = {"heads": {}} | {prior: {"prior_type": prior, "preserve": False} for prior in ("softmax", "gla", "mamba")}


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", REPLACED)
def test_padding_and_documents_are_seen_in_the_mask_of_the_original(kind, implementation):
    model = awake(lively(replace_attention(decoder("llama"), **REPLACED[kind])))
    model.set_attn_implementation(implementation)
    ids = tokens(2, 11)
    positions = (PADDED.cumsum(1) - 1).clamp_min(0)
    padded = model(ids, attention_mask=PADDED, position_ids=positions).logits
    close(padded[:1, 4:], model(ids[:1, 4:]).logits, 1e-5)
    close(padded[1:], model(ids[1:]).logits, 1e-5)
    restarts = torch.cat([torch.arange(4), torch.arange(7)])[None]
    packed = model(ids[:1], position_ids=restarts, use_cache=False).logits
    close(packed, torch.cat([model(ids[:1, :4]).logits, model(ids[:1, 4:]).logits], 1), 1e-5)


def test_fresh_mixers_continue_the_last_of_packed_documents():
    model = lively(replace_attention(decoder("llama"), "gla", preserve=False))
    ids, document = tokens(1, 9), torch.tensor([0, 0, 0, 1, 1, 1, 1, 1, 1])
    mask = ((document[:, None] == document) & torch.ones(9, 9, dtype=torch.bool).tril())[None, None]
    prefill = model(ids[:, :7], attention_mask=mask[..., :7, :7], use_cache=True)
    further = model(ids[:, 7:], attention_mask=mask[..., 7:, :], past_key_values=prefill.past_key_values)
    close(further.logits, model(ids[:, 3:]).logits[:, 4:], 1e-5)


@pytest.mark.parametrize("prior", ["softmax", "gla", "mamba"])
def test_fresh_mixers_of_an_encoder_ignore_padding_and_project_their_output_alone(prior):
    model = lively(replace_attention(bert(), prior, preserve=False))
    ids, padding = tokens(1, 7), torch.tensor([[1, 1, 1, 1, 0, 0, 0]])
    close(model(ids, attention_mask=padding).logits[:, :4], model(ids[:, :4]).logits, 1e-5)
    first = model(ids).logits[:, 0]
    assert not torch.allclose(first, model(ids[:, :6]).logits[:, 0], atol=1e-4)
    assert not list(model.bert.encoder.layer[0].attention.output.dense.parameters())


def test_fresh_mixers_match_the_parameters_of_plain_attention():
    model = replace_attention(decoder("gpt2"), "gla", preserve=False, use_conv=False)
    mixers = [m for m in model.modules() if isinstance(m, FreeEnergyMixer)]
    assert len(mixers) == 3
    assert all(mixer.parameter_report()["ratio"] == pytest.approx(1, abs=0.1) for mixer in mixers)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_fresh_mixer_is_causal_as_the_call_is_or_refused(implementation):
    """CLIP's text is causal by an argument, and by its mask."""
    config = transformers.CLIPTextConfig(**TEXT, **DECODER, max_position_embeddings=64)
    config._attn_implementation = implementation
    plain, causal = (lively(transformers.CLIPTextModel(config)) for _ in range(2))
    replace_attention(plain, "gla", preserve=False)
    with pytest.raises(ValueError, match=r"(is_causal|attention_mask) must .*pass causal=True to replace_attention"):
        plain(tokens())
    lively(replace_attention(causal, "gla", preserve=False, causal=True))
    close(causal(tokens()).last_hidden_state[:, :7], causal(tokens()[:, :7]).last_hidden_state, 1e-5)
    encoder = bert()
    encoder.set_attn_implementation(implementation)
    replace_attention(encoder, "gla", preserve=False, causal=True)
    with pytest.raises(ValueError, match=r"got (False|one that hides or shows .*); pass preserve=True to replace"):
        encoder(tokens(), attention_mask=PADDED)


def test_fresh_mixers_read_masks_of_any_low_number_and_refuse_what_they_cannot():
    model = lively(replace_attention(decoder("llama"), "gla", preserve=False))
    allowed = torch.ones(11, 11, dtype=torch.bool).tril()
    allowed[:, :4] = False
    for low in (torch.finfo(torch.float32).min, -1e9, -1e4):
        padded = model(tokens(1), attention_mask=torch.where(allowed, 0.0, low)[None, None]).logits
        close(padded[:, 4:], model(tokens(1)[:, 4:]).logits, 1e-5)
    prefix, hole = (torch.ones(11, 11, dtype=torch.bool).tril() for _ in range(2))
    prefix[:4, :4], hole[7, 5] = True, False
    for mask in (prefix, hole):
        with pytest.raises(ValueError, match=r"must only hide .*later tokens, got one that hides or shows"):
            model(tokens(1), attention_mask=mask[None, None])
    with pytest.raises(ValueError, match="got one that adds numbers to scores; pass preserve=True to replace"):
        model(tokens(1), attention_mask=torch.where(hole, -0.5, -1e9)[None, None])


def test_a_fresh_mixer_has_the_window_without_a_mask():
    model = lively(replace_attention(decoder("mistral"), preserve=False))
    assert {config.window for config in configs_of(model)} == {5}
    masked = model(tokens(1, 11)).logits
    model.config._attn_implementation = "flash_attention_2"
    close(model(tokens(1, 11)).logits, masked, 1e-5)


def test_a_fresh_mixer_has_no_window_where_the_original_reads_none_and_as_many_keys_as_other_heads():
    model = decoder("llama")
    model.config.sliding_window = 5
    (config,) = {*configs_of(replace_attention(model, preserve=False, n_head=1, causal=True))}
    assert (config.window, config.n_head, config.kv_heads) == (None, 1, 1)
