"""FEM in the hands of other libraries: peft's adapters, transformers' heads and generation, survey of model types."""

from __future__ import annotations

import random

import pytest
import torch
import transformers
from clients.survey import model_types, survey
from originals import GROUPED, decoder
from small_models import VOCABULARY, lively, small_config, small_model, tokens
from torch import nn
from transformers_suite import is_here, run

from fem import PRIORS, replace_attention
from fem.models import LORA, FEMForCausalLM
from fem.models.surgery.pretrained import RUNNING, free_energy_attention
from fem.projection import Projection

# --- peft


def adapted(model: nn.Module, **options) -> nn.Module:
    peft = pytest.importorskip("peft", reason="adapters need peft, of the extra 'dev'")
    return peft.get_peft_model(model, peft.LoraConfig(r=2, task_type="CAUSAL_LM", **options))


def trained_step(model: nn.Module) -> nn.Module:
    """One step of training that every trained parameter must feel, without a NaN."""
    ids = tokens(2, 9)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    model.train()(input_ids=ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name
    optimizer.step()
    return model.eval()


@pytest.mark.parametrize("prior", list(PRIORS))
def test_peft_adapts_the_maps_of_every_prior(prior):
    model = trained_step(adapted(FEMForCausalLM(small_config(prior_type=prior)), target_modules=LORA["target_modules"]))
    changed = {name.split(".lora_")[0].rpartition(".")[2] for name, p in model.named_parameters() if p.requires_grad}
    assert changed >= {"value", "output"}
    assert changed <= {"query", "key", "value", "output"}


@pytest.mark.parametrize("kind", ["fem", "replaced"])
def test_adapters_with_beta_and_lambda_come_back(kind, tmp_path):
    peft = pytest.importorskip("peft", reason="adapters need peft, of the extra 'dev'")
    base = small_model() if kind == "fem" else replace_attention(decoder("llama"), lambda_init=-1.0)
    base.save_pretrained(tmp_path / "base")
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    options = LORA if kind == "fem" else {"modules_to_save": LORA["modules_to_save"]}
    model = trained_step(adapted(opened, **options))
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert any(".beta." in name for name in trained)
    assert any(".inner." in name for name in trained)
    model.save_pretrained(tmp_path / "adapter")
    ids = tokens(1, 7)
    other = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    torch.testing.assert_close(other(input_ids=ids).logits, model(input_ids=ids).logits)
    torch.testing.assert_close(model.merge_and_unload()(ids).logits, other(input_ids=ids).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PromptEncoderConfig"])
def test_learnt_prompts_stand_before_padded_rows(kind):
    peft = pytest.importorskip("peft", reason="adapters need peft, of the extra 'dev'")
    options = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = peft.get_peft_model(FEMForCausalLM(small_config()), options)
    ids, keep = tokens(2, 9), torch.ones(2, 9, dtype=torch.long)
    keep[0, 5:] = 0
    out = model(input_ids=ids, attention_mask=keep, labels=ids.masked_fill(keep == 0, -100), logits_to_keep=0)
    out.loss.backward()
    assert all(p.grad.any() for p in model.parameters() if p.requires_grad)
    alone = model(input_ids=ids[:1, :5], logits_to_keep=0)
    torch.testing.assert_close(out.logits[:1, : 3 + 5], alone.logits)
    told = model.eval().generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, pad_token_id=0)
    assert told.shape == (2, 11)


@pytest.mark.parametrize("kind", ["fem in float32", "fem in bfloat16", "fem in float16", "replaced"])
def test_dora_divides_by_no_zero(kind):
    dtype = getattr(torch, kind.split()[-1], None)
    model = replace_attention(decoder("llama")) if dtype is None else FEMForCausalLM(small_config()).to(dtype)
    trained_step(adapted(model, use_dora=True, target_modules="all-linear"))


@pytest.mark.parametrize("implementation", ["exact", "sdpa", "eager"])
def test_learnt_prefixes_are_refused(implementation):
    peft = pytest.importorskip("peft", reason="adapters need peft, of the extra 'dev'")
    base = FEMForCausalLM(small_config(mixer={"use_conv": False}))
    base.set_attn_implementation(implementation)
    model = peft.get_peft_model(base, peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with pytest.raises((TypeError, ValueError), match="past_key_values must be"):
        model(input_ids=tokens(2, 5), labels=tokens(2, 5))


# --- heads and generation


@pytest.mark.parametrize("head", ["SequenceClassification", "TokenClassification", "QuestionAnswering"])
def test_heads_of_transformers_learn_and_come_back(head, tmp_path):
    auto = getattr(transformers, f"AutoModelFor{head}")
    model = auto.from_config(small_config(num_labels=3, pad_token_id=0))
    ids = tokens(2, 7)
    labels = {
        "SequenceClassification": {"labels": torch.tensor([0, 2])},
        "TokenClassification": {"labels": ids % 3},
        "QuestionAnswering": {"start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([3, 4])},
    }[head]
    loss = model.train()(ids, **labels).loss
    loss.backward()
    assert loss.isfinite()
    assert model.model.layers[0].mixer.value.weight.grad.any()
    model.eval().save_pretrained(tmp_path)
    found, expected = auto.from_pretrained(tmp_path)(ids), model(ids)
    for name in expected:
        if isinstance(expected[name], torch.Tensor):
            torch.testing.assert_close(found[name], expected[name])


def test_padding_changes_no_reward():
    model = transformers.AutoModelForSequenceClassification.from_config(small_config(num_labels=1, pad_token_id=0))
    ids = tokens(1, 7)
    padded = torch.cat([ids, torch.zeros(1, 3, dtype=torch.long)], 1)
    torch.testing.assert_close(model.eval()(padded, attention_mask=(padded != 0).long()).logits, model(ids).logits)


def test_priors_of_fixed_state_have_no_longest_row_unless_asked():
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    longest = lambda **fields: FEMForCausalLM.config_class(**sizes, **fields).max_position_embeddings  # noqa: E731
    assert longest() == longest(layer_priors=["gla", "softmax"]) == 4096
    assert longest(prior_type="gla") is None
    assert longest(prior_type="gla", max_position_embeddings=16) == 16


# --- quantisation and sentence embeddings


@pytest.mark.filterwarnings("ignore:torch.")
def test_dynamic_quantisation_leaves_no_projection_silently():
    model = FEMForCausalLM(small_config())
    with pytest.warns(UserWarning, match="torch.ao leaves the projections of FEM layers as they are"):
        low = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, torch.qint8)
    assert any(type(module) is Projection for module in low.modules())


def test_maps_that_lora_adapts_are_plain_linear_in_a_model_that_is_to_be_quantised():
    model = lively(FEMForCausalLM(small_config()))
    config = small_config()
    config.quantization_config = {"load_in_4bit": True}
    built = FEMForCausalLM(config)
    built.load_state_dict(model.state_dict())
    named = {type(part) for path, part in built.named_modules() if path.split(".")[-1] in LORA["target_modules"]}
    assert named == {nn.Linear}  # bitsandbytes leaves subclasses as they are
    assert type(built.model.layers[0].mixer.gate.inner) is Projection
    torch.testing.assert_close(built.eval()(tokens(2, 11)).logits, model.eval()(tokens(2, 11)).logits)


# --- surgery on whatever reads through transformers' attention functions


RIGHT = ["opt", "bart", "marian", "clip", "wav2vec2", "phi", "phi3", "gpt_neox", "t5", "distilbert"]


@pytest.mark.parametrize("model_type", [*RIGHT, "whisper", "modernbert", "gemma2", "gpt_oss", "switch_transformers"])
def test_model_type_computes_what_it_did(model_type):
    found = survey(model_type)
    assert found.result == "right", found


@pytest.mark.slow
def test_no_model_type_crashes_or_computes_something_else():
    for model_type in random.Random(0).sample(model_types(), 60):
        assert survey(model_type).result not in ("crashed", "wrong"), model_type


def gemma2() -> nn.Module:
    sizes = {"head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8}
    config = transformers.Gemma2Config(**GROUPED, **sizes, attn_logit_softcapping=0.7)
    model = lively(transformers.Gemma2ForCausalLM(config))
    model.set_attn_implementation("eager")  # before transformers 5.21 the default leaves out the cap
    return model


def gpt_oss() -> nn.Module:
    sizes = {"head_dim": 8, "sliding_window": 4, "num_local_experts": 2, "num_experts_per_tok": 1}
    return lively(transformers.GptOssForCausalLM(transformers.GptOssConfig(**GROUPED, **sizes)))


@pytest.mark.parametrize("build", [gemma2, gpt_oss])
def test_capped_scores_and_sinks_generate_as_the_original_does(build):
    model, ids = build(), tokens(2, 7)
    ids[0, :3] = 0
    options = {"max_new_tokens": 8, "do_sample": False, "attention_mask": (ids != 0).long()}
    logits, text = model(ids[1:]).logits, model.generate(ids, **options)
    replaced = replace_attention(model, lambda_init=-20.0)
    replaced(tokens(1, 7)).logits.square().sum().backward()
    of_attention = {name: p.grad for name, p in replaced.named_parameters() if "self_attn" in name}
    learnt = lambda grad: grad is not None and grad.any() and grad.isfinite().all()  # noqa: E731
    assert not [name for name, grad in of_attention.items() if not learnt(grad)]
    torch.testing.assert_close(replaced(ids[1:]).logits, logits, rtol=1e-4, atol=1e-4)
    assert torch.equal(replaced.generate(ids, **options), text)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("softcap", "sinks"), [(0.7, False), (None, True), (0.7, True)])
def test_capped_scores_and_sinks_are_in_the_free_energy(softcap, sinks, masked):
    attention = replace_attention(gpt_oss(), lambda_init=0.0).model.layers[0].self_attn.double()
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, 5, 8, dtype=torch.float64, generator=generator) for h in (4, 2, 2))
    sink = attention.sinks if sinks else None
    rows, columns = torch.arange(5)[:, None], torch.arange(5)
    visible = (columns <= rows) & (columns > rows - 3) if masked else columns <= rows
    features = torch.zeros(2, 5, 32, dtype=torch.float64)
    mask = visible.expand(2, 1, 5, 5) if masked else None
    RUNNING.features.append(features)
    found, _ = free_energy_attention(attention, q, k, v, mask, 0.5, softcap=softcap, s_aux=sink)
    beta, k, v = (x.repeat_interleave(2, -2 if x.ndim == 2 else 1) for x in (attention.free_energy.beta(), k, v))
    scores = 0.5 * q @ k.mT
    scores = (softcap * torch.tanh(scores / softcap) if softcap else scores).masked_fill(~visible, -torch.inf)
    if sinks:
        scores, v = torch.cat([sink.view(4, 1, 1).expand(2, 4, 5, 1), scores], -1), nn.functional.pad(v, (0, 0, 1, 0))
    p, beta = scores.softmax(-1), beta[:, None]
    wanted = 0.5 * (p @ v) + 0.5 * (p @ (beta * v).exp()).log() / beta
    torch.testing.assert_close(found, wanted.transpose(1, 2), rtol=1e-5, atol=1e-5)


def test_encoder_decoder_generates_as_the_original_does():
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": VOCABULARY}
    config = transformers.T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1)
    model = lively(transformers.T5ForConditionalGeneration(config))
    options = {"max_new_tokens": 8, "do_sample": False, "num_beams": 2}
    expected = model.generate(tokens(2, 7), **options)
    assert torch.equal(replace_attention(model, lambda_init=-20.0).generate(tokens(2, 7), **options), expected)


@pytest.mark.slow
def test_transformers_own_tests_find_no_fault_in_a_softmax_model():
    if not is_here():
        pytest.skip("needs transformers' source distribution, which `make suite` downloads")
    found = run("softmax without C", None)
    assert not found["failures"]
    assert found["passed"] > 50
