"""Saved models in the hands of programs that never heard of fem: they open them rightly, or refuse."""

from __future__ import annotations

import copy
import json
import sys
from functools import partial

import numpy as np
import pytest
import torch
import transformers
from originals import DECODER, GROUPED, TEXT, bert, decoder, vision
from processes import printed
from small_models import VOCABULARY, awake, lively, small_config, tokens

import fem
from fem import replace_attention
from fem.extras import how_to_install
from fem.models import FEMForCausalLM, FEMForImageClassification, FEMImageConfig, load_replaced
from fem.models.surgery.head import FreeEnergyHead

HOSTS = {name: partial(decoder, name) for name in ("llama", "gpt2")}
TRAINED = HOSTS | {"bert": bert}


@pytest.fixture(params=list(HOSTS))
def replaced(request):
    return awake(replace_attention(decoder(request.param)))


def logits_elsewhere(folder, ids, program: str) -> torch.Tensor:
    """What a fresh process that runs `program` makes of the folder: `model`'s logits."""
    script = f"""
import os
os.environ["HF_HUB_OFFLINE"] = "1"
import sys, torch
folder, ids = sys.argv[1], torch.tensor(eval(sys.argv[2]))
{program}
print([[round(x, 5) for x in row] for row in model(ids).logits.flatten(0, 1).tolist()])
"""
    said = printed("-c", script, str(folder), repr(ids.tolist()))
    return torch.tensor(eval(said.strip().splitlines()[-1])).unflatten(0, ids.shape)


# --- models of fem


PROGRAMS = {
    "code that is trusted": """
from transformers import AutoModelForCausalLM
assert "fem" not in sys.modules
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
""",
    "fem imported behind transformers": """
import transformers, fem
model = transformers.AutoModelForCausalLM.from_pretrained(folder)
""",
    "the class named by transformers": """
import json, transformers
config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)
assert config.auto_map
model = getattr(transformers, config.architectures[0]).from_pretrained(folder)
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fem", "replaced"])
@pytest.mark.parametrize("program", list(PROGRAMS))
def test_fresh_process_opens_what_was_saved(kind, program, tmp_path):
    model = lively(FEMForCausalLM(small_config())) if kind == "fem" else awake(replace_attention(decoder("llama")))
    model.save_pretrained(tmp_path)
    ids = tokens(1, 7)
    found = logits_elsewhere(tmp_path, ids, PROGRAMS[program])
    torch.testing.assert_close(found, model(ids).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fem", "replaced"])
def test_untrusted_code_is_refused(kind, tmp_path):
    model = FEMForCausalLM(small_config()) if kind == "fem" else replace_attention(decoder("llama"))
    model.save_pretrained(tmp_path)
    program = "from transformers import AutoModelForCausalLM\nmodel = AutoModelForCausalLM.from_pretrained(folder)"
    with pytest.raises(AssertionError, match="trust_remote_code"):
        logits_elsewhere(tmp_path, tokens(1, 5), program)


def test_trusted_code_needs_no_second_copy_of_the_library(tmp_path):
    FEMForCausalLM(small_config()).save_pretrained(tmp_path)
    assert how_to_install("lm") in (tmp_path / "open_with_fem.py").read_text()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True)
    loaded.save_pretrained(tmp_path / "again")
    assert type(loaded) is FEMForCausalLM
    assert sorted(path.name for path in (tmp_path / "again").glob("*.py")) == ["open_with_fem.py"]
    assert "auto_map" in json.loads((tmp_path / "again" / "config.json").read_text())


def test_image_models_say_who_opens_them(tmp_path):
    model = FEMForImageClassification(FEMImageConfig(image_size=8, patch_size=4, hidden_size=16, num_hidden_layers=1,
                                                     num_attention_heads=2)).eval()  # fmt: skip
    model.save_pretrained(tmp_path)
    pixels = torch.randn(1, 3, 8, 8)
    loaded = transformers.AutoModelForImageClassification.from_pretrained(tmp_path, trust_remote_code=True)
    torch.testing.assert_close(loaded(pixels).logits, model(pixels).logits)


# --- replaced models


class Reward(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.model, self.head = decoder("llama"), torch.nn.Linear(VOCABULARY, 1)


def in_two_calls() -> torch.nn.Module:
    model = replace_attention(decoder("llama"), layers=[1], beta_max_init=0.5)
    return replace_attention(model, layers=[0], use_outer_gate=False, lambda_init=np.float32(-5))


def a_body() -> torch.nn.Module:
    model = decoder("llama")
    for layer in (1, 0):
        replace_attention(model.model, layers=[layer])
    return model


def two_models(preserve: bool) -> torch.nn.Module:
    encoder = transformers.BertConfig(**TEXT, **DECODER)
    decoder = transformers.BertConfig(**TEXT, **DECODER, is_decoder=True, add_cross_attention=True)
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    return replace_attention(lively(transformers.EncoderDecoderModel(config)), preserve=preserve)


def pictures() -> torch.nn.Module:
    return replace_attention(vision("ViT"), "linear", preserve=False, use_conv=False)


REPLACED = {name: lambda build=build: replace_attention(build()) for name, build in HOSTS.items()} | {
    "in two calls": in_two_calls,
    "a body": a_body,
    "within a module": lambda: replace_attention(Reward()).model,
    "two models": lambda: two_models(True),
    "two models with fresh mixers": lambda: two_models(False),
    "pictures with fresh mixers": pictures,
}


@pytest.mark.parametrize("name", REPLACED)
def test_what_was_saved_opens_as_it_is_and_is_saved_again(name, tmp_path):
    model = awake(REPLACED[name]())
    model.save_pretrained(tmp_path / "once")
    ids = tokens(2, 7)
    given = {"pixel_values": torch.randn(2, 3, 8, 8)} if name.startswith("pictures") else {"input_ids": ids}
    given |= {"decoder_input_ids": ids[:, :5]} if name.startswith("two") else {}
    opened = load_replaced(tmp_path / "once")
    assert type(opened) is type(model)
    torch.testing.assert_close(opened(**given).logits, model(**given).logits)
    opened.save_pretrained(tmp_path / "again")
    torch.testing.assert_close(load_replaced(tmp_path / "again")(**given).logits, model(**given).logits)
    first, second = (json.loads((tmp_path / each / "config.json").read_text()) for each in ("once", "again"))
    if name != "a body":  # its whole did not know, when it was first saved
        auto = getattr(transformers, first["architectures"][0])
        torch.testing.assert_close(auto.from_pretrained(tmp_path / "once")(**given).logits, model(**given).logits)
        same = first.keys() - {"encoder", "decoder"}  # which transformers itself saves with another dtype
        assert {field: first[field] for field in same} == {field: second.get(field) for field in same}
        assert first.keys() == second.keys()
    assert load_replaced(tmp_path / "once", dtype=torch.float64).dtype == torch.float64


@pytest.mark.parametrize("auto", ["AutoModel", "AutoModelForSequenceClassification"])
def test_the_body_of_what_was_saved_opens_alone_and_under_another_head(replaced, auto, tmp_path):
    replaced.save_pretrained(tmp_path)
    ids, loaded = tokens(2, 9), getattr(transformers, auto).from_pretrained(tmp_path)
    torch.testing.assert_close(loaded.base_model(ids).last_hidden_state, replaced.base_model(ids).last_hidden_state)
    assert sum(isinstance(head, FreeEnergyHead) for head in loaded.modules()) == 3


def test_models_of_one_config_are_saved_each_as_it_is(tmp_path):
    """A baseline beside the replaced model, and a second seed."""
    config = transformers.LlamaConfig(**GROUPED)
    base, *seeds = (lively(transformers.LlamaForCausalLM(config)) for _ in range(3))
    first, second = (awake(replace_attention(model, layers=[index])) for index, model in enumerate(seeds))
    ids = tokens(1, 7)
    assert type(config) is type(base.config) is transformers.LlamaConfig
    for name, model, opens in (("base", base, transformers.LlamaForCausalLM.from_pretrained),
                               ("first", first, load_replaced), ("second", second, load_replaced)):  # fmt: skip
        model.save_pretrained(tmp_path / name)
        torch.testing.assert_close(opens(tmp_path / name)(ids).logits, model(ids).logits)
    replace_attention(transformers.LlamaModel(copy.deepcopy(config)))  # a body notes it in a config that it may share
    base.save_pretrained(tmp_path / "again")
    assert type(transformers.AutoModel.from_pretrained(tmp_path / "again")) is transformers.LlamaModel


def test_a_replaced_part_is_not_put_into_other_layers(tmp_path):
    sizes = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4}
    sizes |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "vocab_size": VOCABULARY}
    model = transformers.BartForConditionalGeneration(transformers.BartConfig(**sizes))
    replace_attention(model.model.decoder, layers=[0])
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="into a part with 2 self-attentions, and BartForConditionalGeneration has 4"):
        load_replaced(tmp_path)


def test_load_replaced_wants_a_replaced_model(tmp_path):
    decoder("gpt2").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="from_pretrained"):
        load_replaced(tmp_path)
    with pytest.raises(ValueError, match=r"folder must be a folder, got no such one: .*nowhere"):
        load_replaced(tmp_path / "nowhere")


def test_adapters_come_after_the_replacement():
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(decoder("llama"), peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="model must be replaced before it gets adapters"):
        replace_attention(adapted)


def test_class_of_the_original_refuses_a_replaced_model(replaced, tmp_path):
    replaced.save_pretrained(tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    for given in ({}, {"config": config}):
        with pytest.raises(Exception, match="this folder holds a replaced model"):
            type(replaced).from_pretrained(tmp_path, **given)
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, config=config)
    torch.testing.assert_close(opened(tokens(1, 5)).logits, replaced(tokens(1, 5)).logits)


def trained(model: torch.nn.Module, folder, steps: int, **options) -> transformers.Trainer:
    """A Trainer that has trained `model` on eight rows, with a checkpoint after every second step."""
    rows = [{"input_ids": row, "labels": row} for row in tokens(8, 6)]
    arguments = transformers.TrainingArguments(
        folder, max_steps=steps, save_steps=2, eval_steps=2, eval_strategy="steps", load_best_model_at_end=True,
        per_device_train_batch_size=2, learning_rate=1e-2, lr_scheduler_type="constant", use_cpu=True, report_to=[],
        disable_tqdm=True, seed=0,
    )  # fmt: skip
    trainer = transformers.Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:2])
    trainer.train(**options)
    return trainer


@pytest.mark.parametrize("host", ["llama", *(pytest.param(host, marks=pytest.mark.slow) for host in ("gpt2", "bert"))])
def test_trainer_resumes_a_replaced_model(host, tmp_path):
    model = replace_attention(TRAINED[host](), lambda_init=-1.0)
    start = copy.deepcopy(model)
    full = trained(model, tmp_path / "full", 4)
    halfway = trained(start, tmp_path / "half", 2)
    loaded = load_replaced(tmp_path / "half" / "checkpoint-2")
    assert full.state.best_model_checkpoint is not None
    torch.testing.assert_close(loaded.state_dict(), halfway.model.state_dict())  # the best, which was saved last
    resumed = trained(loaded, tmp_path / "half", 4, resume_from_checkpoint=str(tmp_path / "half" / "checkpoint-2"))
    assert resumed.state.global_step == 4
    torch.testing.assert_close(resumed.model.state_dict(), full.model.state_dict())


def test_config_of_a_replaced_model_builds_one(replaced):
    built = transformers.AutoModelForCausalLM.from_config(replaced.config)
    built.load_state_dict(replaced.state_dict())
    torch.testing.assert_close(built.eval()(tokens(1, 5)).logits, replaced(tokens(1, 5)).logits)


class OutsideConfig(transformers.LlamaConfig):
    model_type = "outside"


class OutsideModel(transformers.LlamaForCausalLM):
    config_class = OutsideConfig


@pytest.mark.parametrize("how", [{}, {"preserve": False, "prior_type": "mamba"}], ids=["preserved", "fresh"])
@pytest.mark.parametrize("lacks", ["all", "what replaced attention"])
def test_what_a_checkpoint_lacks_starts_as_in_a_new_replaced_model(how, lacks, tmp_path):
    """On the meta device, whose memory holds anything once it is there; or beside weights of the original."""
    new = replace_attention(decoder("llama"), **how)
    new.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(tmp_path))
    ours = [name for name, _ in new.named_parameters() if "free_energy" in name or "mixer" in name]
    model = copy.deepcopy(model).to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(torch.nan)
            if lacks != "all" and name not in ours:
                parameter.copy_(new.get_parameter(name))._is_hf_initialized = True
    model.init_weights()
    for name in ours:
        found, wanted = model.get_parameter(name), new.get_parameter(name)
        if wanted.std() == 0:
            assert torch.equal(found, wanted), name
        else:
            assert 0.5 < found.std() / wanted.std() < 2, name
    if lacks != "all":
        assert all(torch.equal(x, new.get_parameter(n)) for n, x in model.named_parameters() if n not in ours)


def test_classes_outside_transformers_are_loaded_by_passing_them(tmp_path):
    model = awake(replace_attention(lively(OutsideModel(OutsideConfig(**GROUPED)))))
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"type 'outside'.*load_replaced\(folder, architecture=...\)"):
        load_replaced(tmp_path)
    loaded = load_replaced(tmp_path, architecture=OutsideModel)
    assert type(loaded) is OutsideModel
    torch.testing.assert_close(loaded(tokens(1, 5)).logits, model(tokens(1, 5)).logits)


@pytest.mark.slow
def test_fem_finds_transformers_when_it_comes_second():
    """`import fem` alone stays light: it registers its models only where transformers is there already."""
    light = "import sys, fem; assert 'transformers' not in sys.modules"
    both = "import transformers, fem; assert 'fem' in transformers.models.auto.configuration_auto.CONFIG_MAPPING"
    printed("-c", light), printed("-c", both)
    assert fem.models is sys.modules["fem.models"]
