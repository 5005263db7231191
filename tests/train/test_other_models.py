"""`fem train --model`: models of other libraries, on the same rows and by the same recipe."""

import json
from dataclasses import replace

import pytest
import torch
from trainings import losses, tiny
from transformers import AutoTokenizer, GPT2Config

from fem.models import FEMConfig
from fem.train import train
from fem.train.checkpoints import load_language_model, newest
from fem.train.model import build_model

SIZES = {"hidden_size": 32, "num_hidden_layers": 2}
LLAMA = SIZES | {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 48}
MAMBA2 = SIZES | {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 8}
FEM = SIZES | {"num_attention_heads": 2, "intermediate_size": 48}
INDIVISIBLE = {"n_embd": 30, "n_head": 4}
ROBERTA = FEM | {"is_decoder": True}  # asks for a pad_token_id
MODELS = {"llama": LLAMA, "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2}, "mamba2": MAMBA2}


def other(data, model, **changes):
    return tiny(data, architecture=model, model=json.dumps(MODELS[model]), **changes)


@pytest.mark.parametrize("model", MODELS)
def test_a_model_of_transformers_trains_on_the_rows_of_fem(data, tmp_path, model):
    recipe = other(data, model, max_steps=2, warmup_steps=1, eval_steps=2, log_steps=1)
    results = train.run(recipe, tmp_path)["train"]
    assert results["step"] == 2
    assert results["val_loss"] == pytest.approx(5.7, abs=0.3)  # log 300
    trained, _ = load_language_model(newest(tmp_path))
    assert trained.config.model_type == model
    assert results["parameters"] == trained.num_parameters()
    assert "lambda_mean" not in results
    rows = train.load_rows(recipe, tmp_path)[1]
    assert set(rows[0]) == {"input_ids", "labels", "segment_ids"}
    ids, labels = (torch.stack([row[name] for row in rows]) for name in ("input_ids", "labels"))
    with torch.no_grad():
        logits = trained(input_ids=ids).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
    assert results["val_loss"] == pytest.approx(loss.item(), rel=1e-5)


def test_accumulated_steps_and_a_resumed_run_are_the_whole_one(data, tmp_path):
    whole = other(data, "llama", max_steps=6, save_steps=3)
    train.run(whole, tmp_path / "whole")
    train.run(replace(whole, micro_batch=1), tmp_path / "parts")
    torch.testing.assert_close(losses(tmp_path / "parts"), losses(tmp_path / "whole"), rtol=1e-4, atol=0)
    train.run(replace(whole, max_steps=3, warmup_steps=2), tmp_path / "stopped")
    with pytest.raises(ValueError, match="another recipe: model \\(llama there, gpt2 here\\), model_fields"):
        train.run(other(data, "gpt2", max_steps=6, save_steps=3), tmp_path / "stopped", resume=True)
    assert train.run(whole, tmp_path / "stopped", resume=True)["train"]["step"] == 6


@pytest.mark.parametrize(
    "hides, config", [(False, GPT2Config(n_embd=32, n_layer=1, n_head=2)), (True, FEMConfig(**FEM))]
)
def test_a_model_is_said_to_see_earlier_documents_where_it_does(data, tmp_path, capsys, hides, config):
    config.to_json_file(tmp_path / "config.json")
    train.run(tiny(data, architecture=str(tmp_path), model="{}", max_steps=1, warmup_steps=0), tmp_path / "run")
    assert ("sees the documents before" not in capsys.readouterr().err) == hides


@pytest.mark.parametrize("model_type, said", [("llama", False), ("qwen2", True)])
def test_a_type_beside_which_another_tokenizer_is_opened_is_said_and_fem_opens_that_of_the_rows(
    data, tmp_path, capsys, model_type, said
):
    """transformers opens any tokenizer beside a qwen2 as Qwen2Tokenizer, with other pieces and an entry more."""
    fields = '{"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}'
    recipe = tiny(data, architecture=model_type, model=fields, max_steps=1, warmup_steps=0)
    train.run(recipe, tmp_path)
    assert ("AutoTokenizer makes a Qwen2Tokenizer" in capsys.readouterr().err) == said
    opened = [AutoTokenizer.from_pretrained(tmp_path / folder) for folder in ("tokenizer", "checkpoint-1")]
    assert (len(opened[0]) != len(opened[1])) == said
    _, tokenizer = load_language_model(newest(tmp_path))
    assert tokenizer.backend_tokenizer.to_str() == train.load_tokenizer(recipe, tmp_path).backend_tokenizer.to_str()


def test_a_config_json_keeps_its_own_sizes(data, tmp_path):
    path = tmp_path / "config.json"
    GPT2Config(n_embd=48, n_layer=1, n_head=3, vocab_size=7, n_positions=64).to_json_file(path)
    for named in (path, tmp_path):
        recipe = tiny(data, architecture=str(named), model='{"n_inner": 16}')
        config = train.model_config(recipe, 300)
        assert isinstance(config, GPT2Config)
        sizes = (config.n_embd, config.n_layer, config.n_inner, config.vocab_size, config.n_positions)
        assert sizes == (48, 1, 16, 300, recipe.context)


def test_a_model_type_takes_width_and_layers_of_the_preset(data):
    config = train.model_config(tiny(data, architecture="llama", preset="fem-sm-small", model="{}"), 300)
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (384, 8, 300)


def test_a_new_model_of_another_library_depends_on_the_seed_alone(data):
    config = train.model_config(other(data, "llama"), 300)
    first, again, second = (build_model(config, seed).lm_head.weight for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


@pytest.mark.parametrize(
    "architecture, fields, sentence",
    [
        ("lama", {}, "^architecture must be a config.json, .* or a model type that .* got 'lama'; did you mean"),
        ("vit", {}, "^architecture must be a causal language model, got 'vit', which has none in its library"),
        ("gemma3", {}, "^architecture must be a model of text alone, got 'gemma3', .* such as gemma3_text"),
        ("llama", {"hiden_size": 3}, "^model_fields must be .* of LlamaConfig, got 'hiden_size'; did you mean hidden"),
        ("gpt2", INDIVISIBLE, "^the model 'gpt2' cannot be built or run, .* --model-fields: .*divisible"),
        ("roberta", ROBERTA, r"^the model 'roberta' cannot be built or run, .* --model-fields: TypeError"),
    ],
)
def test_what_no_library_can_build_or_run_is_refused_in_a_sentence(data, tmp_path, architecture, fields, sentence):
    recipe = tiny(data, architecture=architecture, model=json.dumps(fields))
    with pytest.raises(ValueError, match=sentence):
        train.run(recipe, tmp_path)


@pytest.mark.parametrize("kind, once", [("bert", {"is_decoder": True}), ("xlnet", {"attn_type": "uni"})])
def test_a_model_whose_tokens_see_later_ones_is_refused(data, tmp_path, kind, once):
    fields = SIZES | {"num_attention_heads": 2, "intermediate_size" if kind == "bert" else "d_inner": 48}
    recipe = tiny(data, architecture=kind, model=json.dumps(fields))
    with pytest.raises(ValueError, match=f"must be a causal language model, got '{kind}', whose tokens see later ones"):
        train.run(recipe, tmp_path / "both")
    causal = replace(recipe, model=json.dumps(fields | once))
    assert train.run(causal, tmp_path / "causal")["train"]["step"] == causal.max_steps


def test_a_file_without_a_model_type_is_refused(data, tmp_path):
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"^architecture must be a config.json with a model_type, got "):
        train.model_config(tiny(data, architecture=str(tmp_path)), 300)


def test_special_tokens_are_those_of_the_rows_tokenizer(data, tmp_path):
    train.run(other(data, "llama", max_steps=1, warmup_steps=0), tmp_path)  # a Llama's own end is 2, here a letter
    trained, tokenizer = load_language_model(newest(tmp_path))
    assert trained.generation_config.eos_token_id in (tokenizer.eos_token_id, [tokenizer.eos_token_id])
    assert trained.config.bos_token_id is None
    assert train.model_config(tiny(data, architecture="phi3", model="{}"), 300).pad_token_id is None  # 32000 in phi3
