"""The language model: what it computes, its loss, saving and loading, packing and padding, presets and cards."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from dispatched import watched
from own_priors import WeightedPrior, register
from processes import printed
from small_models import VOCABULARY, every_kind, lively, small_config, tokens
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.loss.loss_utils import ForCausalLMLoss

import fem
from fem import FreeEnergyMixerConfig
from fem.models import FEMConfig, FEMForCausalLM, FEMModel, loss, preset
from fem.models.presets import FAMILIES, count_parameters

# --- the loss


@pytest.mark.parametrize(("num_items", "time"), [(None, 1), (None, 13), (5, 2), (torch.tensor(7), 13)])
def test_chunked_loss_and_gradients_equal_the_loss_of_transformers(monkeypatch, num_items, time):
    monkeypatch.setattr(loss, "LOGITS_AT_ONCE", 3 * VOCABULARY)
    hidden = torch.randn(3, time, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(VOCABULARY, 5, dtype=torch.float64, requires_grad=True)
    labels = tokens(3, time).masked_fill(torch.rand(3, time) < 0.3, -100)
    ours = loss.cross_entropy(hidden, weight, loss.next_tokens(labels), num_items)
    plain = F.cross_entropy(
        (hidden @ weight.T)[:, :-1].reshape(-1, VOCABULARY), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum"
    ) / ((labels[:, 1:] != -100).sum() if num_items is None else num_items)
    theirs = ForCausalLMLoss((hidden @ weight.T).detach(), labels, VOCABULARY, num_items)
    torch.testing.assert_close(ours, plain, equal_nan=True)
    torch.testing.assert_close(ours.float(), theirs, equal_nan=True)
    if time > 1:
        torch.testing.assert_close(*(torch.autograd.grad(3 * found, (hidden, weight)) for found in (ours, plain)))


def test_second_derivatives_of_the_loss_are_those_of_its_logits(softmax_model):
    model, ids = softmax_model.double(), tokens(2, 9)
    weights = tuple(model.parameters())

    def along_itself(value):
        gradients = torch.autograd.grad(value, weights, create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in gradients), weights)

    expected = along_itself(ForCausalLMLoss(model(ids).logits.double(), ids, VOCABULARY))
    torch.testing.assert_close(along_itself(model(ids, labels=ids).loss), expected, rtol=1e-4, atol=1e-6)
    named = dict(model.named_parameters())
    of_labels = lambda p: torch.func.functional_call(model, p, (ids,), {"labels": ids}).loss  # noqa: E731
    mapped, wanted = torch.func.grad(of_labels)(named), torch.autograd.grad(of_labels(named), weights)
    torch.testing.assert_close(mapped, dict(zip(named, wanted)), rtol=1e-4, atol=1e-6)


@every_kind
@pytest.mark.parametrize("name", ["attention_mask", "position_ids"])
def test_a_model_is_mapped_over_rows_with_masks_or_documents_of_their_own(model, name):
    ids, kept = tokens(2, 9), torch.arange(9) >= torch.tensor([[0], [3]])
    marks = {"attention_mask": kept.long(), "position_ids": torch.arange(9) - 3 * kept.long()}[name]
    call = lambda ids, marks: model(ids, **{name: marks}).logits  # noqa: E731
    mapped = torch.func.vmap(lambda ids, marks: call(ids[None], marks[None])[0])(ids, marks)
    torch.testing.assert_close(mapped[kept], call(ids, marks)[kept])


def test_the_loss_makes_no_gradient_for_a_frozen_head():
    hidden, weight, targets = torch.randn(1, 4, 3, requires_grad=True), torch.randn(VOCABULARY, 3), tokens(1, 4)
    found = loss.cross_entropy(hidden, weight, targets)
    assert found.grad_fn.next_functions[0][0].saved_tensors[1] is None
    plain = F.cross_entropy((hidden @ weight.T)[0], targets[0])
    torch.testing.assert_close(*(torch.autograd.grad(x, hidden)[0] for x in (found, plain)))


@every_kind
def test_model_loss_equals_the_loss_of_its_logits(model):
    ids = tokens(2, 11)
    labels = ids.clone()
    labels[0, 4:7] = -100
    output = model(ids, labels=labels)
    torch.testing.assert_close(output.loss, ForCausalLMLoss(output.logits, labels, VOCABULARY))
    assert model(ids.int(), labels=labels.int()).loss == output.loss
    model.loss_function = lambda *given, **further: 2 * ForCausalLMLoss(*given, **further)
    torch.testing.assert_close(model(ids, labels=labels, num_items_in_batch=18).loss, 2 * output.loss * 17 / 18)


def test_a_head_on_another_device_takes_targets_and_their_number_there():
    """As with device_map="auto"; the device meta stands for a second card."""
    model, ids = FEMForCausalLM(small_config(tie_word_embeddings=False)), tokens(2, 11)
    model.lm_head.to("meta")
    model.lm_head.register_forward_pre_hook(lambda head, inputs: (inputs[0].to("meta"),))
    assert model(ids, labels=ids, num_items_in_batch=torch.tensor(7)).loss.device.type == "meta"


@pytest.mark.parametrize("kind", ["adapter", "offloaded", "bias", "hook"])
def test_a_head_that_is_more_than_its_weight_is_called_for_the_loss(kind):
    model, ids = lively(FEMForCausalLM(small_config(tie_word_embeddings=False))), tokens(2, 11)
    base = model
    if kind == "adapter":
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["lm_head"], init_lora_weights=False))
    elif kind == "offloaded":
        pytest.importorskip("accelerate").cpu_offload(model, execution_device="cpu")
    elif kind == "bias":
        base.lm_head.bias = torch.nn.Parameter(torch.randn(VOCABULARY))
    else:
        base.lm_head.register_forward_hook(lambda head, inputs, logits: 2 * logits)
    output = model(input_ids=ids, labels=ids)
    torch.testing.assert_close(output.loss, ForCausalLMLoss(output.logits, ids, VOCABULARY))
    if kind != "offloaded":  # accelerate offloads for inference only
        output.loss.backward()
        learnt = [p for p in base.lm_head.parameters() if p.requires_grad]
        assert learnt
        assert all(p.grad.abs().max() > 0 for p in learnt)


def test_logits_of_the_loss_never_cost_vocabulary_times_tokens(monkeypatch, softmax_model):
    monkeypatch.setattr(loss, "LOGITS_AT_ONCE", 4 * VOCABULARY)
    calls = watched(monkeypatch, F, "log_softmax")
    output = softmax_model.train()(tokens(3, 9), labels=tokens(3, 9))
    output.loss.backward()
    assert output.logits is None
    assert calls
    assert max(arguments[0].numel() for arguments, _, _ in calls) <= 4 * VOCABULARY


def test_bf16_loss_is_summed_in_float32():
    hidden, weight = torch.randn(1, 300, 8).bfloat16(), torch.randn(VOCABULARY, 8).bfloat16()
    labels = tokens(1, 300)
    ours = loss.cross_entropy(hidden, weight, loss.next_tokens(labels))
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, ForCausalLMLoss(hidden @ weight.T, labels, VOCABULARY), rtol=1e-5, atol=1e-5)


def test_logits_to_keep_selects_logits(softmax_model):
    ids = tokens(2, 7)
    logits = softmax_model(ids).logits
    torch.testing.assert_close(softmax_model(ids, logits_to_keep=2).logits, logits[:, -2:])
    torch.testing.assert_close(softmax_model(ids, logits_to_keep=torch.tensor([0, 3, 6])).logits, logits[:, [0, 3, 6]])
    torch.testing.assert_close(softmax_model.train()(ids, labels=ids, logits_to_keep=0).logits, logits)


# --- rows: embeddings; padding and documents are in test_lm_arguments.py


def test_embeddings_stand_for_their_ids(softmax_model):
    ids = tokens(2, 5)
    by_ids = softmax_model(ids, output_hidden_states=True)
    embeddings = softmax_model.get_input_embeddings()(ids)
    torch.testing.assert_close(softmax_model(inputs_embeds=embeddings).logits, by_ids.logits)
    assert len(by_ids.hidden_states) == 3
    torch.testing.assert_close(by_ids.hidden_states[0], embeddings)
    torch.testing.assert_close(softmax_model.lm_head(by_ids.hidden_states[-1]), by_ids.logits)


def test_return_dict_false_returns_a_tuple(softmax_model):
    ids = tokens(1, 5)
    value, logits = softmax_model(ids, labels=ids, return_dict=False)
    assert value.ndim == 0
    assert logits.shape == (1, 5, VOCABULARY)


# --- weights


def test_new_model_starts_as_the_layer_does():
    model = FEMForCausalLM(small_config(hidden_size=64, vocab_size=499, initializer_range=0.05))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.std().item() == pytest.approx(0.05, rel=0.05)
    for block in model.model.layers:
        value, context = block.mixer.value_scale, block.mixer.prior.query
        assert value.weight.abs().max() < 1e-11  # below the rounding of 1 + eta
        assert not context.weight[:, 64:].any()
        assert context.weight[:, :64].std().item() == pytest.approx(0.02, rel=0.1)
        assert block.mixer.conditioner.project.weight.std().item() == pytest.approx(0.02, rel=0.1)
        assert not block.mixer.beta.theta.any()
        assert bool((block.mixer_norm.weight == 1).all())
        assert block.mlp.up_proj.weight.std().item() == pytest.approx(0.05, rel=0.1)


@pytest.mark.parametrize("model", ["softmax", "mamba", "hybrid", "untied"], indirect=True)
def test_saved_model_loads_through_the_auto_classes_with_equal_logits(model, tmp_path):
    ids = tokens(2, 9)
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").exists()
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert isinstance(loaded, FEMForCausalLM)
    tied = loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert tied == model.config.tie_word_embeddings
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    config = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(config, FEMConfig)
    assert config.mixer_configs() == model.config.mixer_configs()
    differing = ("transformers_version", "_name_or_path", "architectures", "dtype")
    kept = lambda config: {k: v for k, v in config.to_dict().items() if k not in differing}  # noqa: E731
    assert kept(config) == kept(model.config)
    assert isinstance(AutoModel.from_pretrained(tmp_path), FEMModel)
    low = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert low.dtype == torch.bfloat16
    assert low.generate(ids, max_new_tokens=2, do_sample=False, pad_token_id=0).shape == (2, 11)
    assert low(ids).logits.isfinite().all()
    torch.testing.assert_close(low.state_dict(), model.bfloat16().state_dict(), rtol=0, atol=0)


def test_weights_that_a_checkpoint_lacks_start_as_new(softmax_model):
    half_a_layer = "model.layers.1.mixer.prior.query.bias"
    lacking = ("model.layers.0.mixer", "lm_head", half_a_layer)
    whole = softmax_model.state_dict().items()
    state = {name: value.clone() for name, value in whole if not name.startswith(lacking)}
    loaded = FEMForCausalLM.from_pretrained(None, config=softmax_model.config, state_dict=state)
    assert not loaded.get_parameter(half_a_layer).any()
    query = "model.layers.1.mixer.prior.query.weight"
    assert torch.equal(loaded.get_parameter(query), softmax_model.get_parameter(query))
    fresh = loaded.model.layers[0].mixer
    assert not fresh.prior.query.weight[:, 16:].any()
    assert fresh.prior.query.weight[:, :16].std().item() == pytest.approx(0.02, rel=0.3)
    assert not fresh.beta.theta.any()
    assert not fresh.prior.query.bias.any()


def test_a_prior_that_cannot_set_what_a_checkpoint_lacks_is_refused(softmax_model, monkeypatch):
    register(monkeypatch)
    config, state = small_config(prior_type="weighted"), softmax_model.state_dict()
    FEMForCausalLM(config)
    with pytest.raises(ValueError, match="'weighted' must have reset_parameters, as the checkpoint lacks its 'weight'"):
        FEMForCausalLM.from_pretrained(None, config=config, state_dict=state)
    start = lambda prior: torch.nn.init.ones_(prior.weight)  # noqa: E731
    monkeypatch.setattr(WeightedPrior, "reset_parameters", start, raising=False)
    loaded = FEMForCausalLM.from_pretrained(None, config=config, state_dict=state)
    assert loaded.model.layers[1].mixer.prior.weight.tolist() == [1.0, 1.0]


def test_resized_vocabulary_stays_tied_and_keeps_old_logits(softmax_model):
    ids = tokens(1, 6)
    before = softmax_model(ids).logits
    softmax_model.resize_token_embeddings(VOCABULARY + 6)
    assert softmax_model.lm_head.weight is softmax_model.model.embed_tokens.weight
    assert softmax_model.config.vocab_size == VOCABULARY + 6
    torch.testing.assert_close(softmax_model(ids).logits[..., :VOCABULARY], before)
    assert softmax_model(ids + 6, labels=ids + 6).loss.isfinite()


# --- training


def loss_and_gradients(model):
    model.train().zero_grad()
    ids = tokens(2, 9)
    value = model(input_ids=ids, labels=ids).loss
    value.backward()
    return value.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@every_kind
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_changes_nothing(model, use_reentrant):
    plain = loss_and_gradients(model)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    torch.testing.assert_close(loss_and_gradients(model), plain, rtol=1e-5, atol=2e-6)


COMPILED = """
import torch
from fem.models import FEMForCausalLM
from fem.models.loss import cross_entropy
from small_models import MODELS, small_config, small_model, tokens
torch.set_num_threads(1)
ids = tokens(2, 9)
for fields in MODELS.values():
    torch.manual_seed(0)
    model, results = FEMForCausalLM(small_config(**fields)).train(), []
    for run in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        model.zero_grad()
        loss = run(input_ids=ids, labels=ids).loss
        loss.backward()
        results.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)
    torch.compiler.reset()

hidden, weight, graphs = torch.randn(2, 64, 8, requires_grad=True), torch.randn(16, 8, requires_grad=True), []
count = lambda graph, inputs: graphs.append(graph) or graph.forward
run = torch.compile(lambda h, y: cross_entropy(h, weight, y), backend=count)
for time in (64, 48, 33, 41, 22):
    run(hidden[:, :time], torch.zeros(2, time, dtype=torch.long))
assert len(graphs) == 2, "one for the first length, one for all others"

torch.compiler.reset()
model = small_model(mixer={"use_conv": False})
model.set_attn_implementation("sdpa")
with torch.no_grad():
    compiled = torch.compile(model, backend="eager", fullgraph=True)(ids)
torch.testing.assert_close(compiled.logits, model(ids).logits)
"""


@pytest.mark.slow
def test_loss_gradients_and_logits_of_an_engine_are_one_graph_each_and_equal_eager():
    """The loss of any length. In a process of its own: the shape checks of the other tests break graphs."""
    printed("-c", COMPILED)


def test_marks_are_read_once_for_all_layers(softmax_model, monkeypatch):
    """And for blocks computed again; anew by the next call, whose marks may be others in the same tensor."""
    model, calls = softmax_model.train(), watched(monkeypatch, fem.ops.common.tokens, "read_tokens")
    model.gradient_checkpointing_enable()
    ids, segments = tokens(2, 9), torch.zeros(2, 9, dtype=torch.long)
    for start in (6, 4):
        segments[:, start:] = 1
        packed, apart = model(ids, segment_ids=segments), model(ids[:, start:])
        torch.testing.assert_close(packed.logits[:, start:], apart.logits)
        packed.logits.sum().backward()
    assert len(calls) == 2 < 2 * len(model.model.layers)


def test_every_parameter_learns(model):
    _, gradients = loss_and_gradients(model)
    unused = {name for name, p in model.named_parameters() if name not in gradients or not gradients[name].any()}
    assert not {name for name in unused if not name.endswith("key.bias")}  # softmax is blind to a shift of all scores


def test_label_smoothing_of_the_trainer_predicts_the_next_token(tmp_path):
    ids = tokens(2, 11)
    model = FEMForCausalLM(small_config()).train()
    arguments = TrainingArguments(tmp_path, label_smoothing_factor=0.1, use_cpu=True, report_to=[])
    found = Trainer(model, arguments).compute_loss(model, {"input_ids": ids, "labels": ids})
    logits = model(ids).logits[:, :-1]
    wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), label_smoothing=0.1)
    torch.testing.assert_close(found, wanted)


# --- configuration, presets, card


def test_layers_have_the_weights_of_plain_attention_unless_widths_are_given():
    assert small_config(hidden_size=64, num_attention_heads=4).mixer_configs()[0].linear_weights == 4 * 64**2
    direct = small_config(hidden_size=64, num_attention_heads=4, mixer={"fem_dim": 16, "qk_dim": 32}).mixer_configs()[0]
    assert (direct.fem_dim, direct.qk_dim) == (16, 32)


def test_layer_priors_override_the_shared_fields():
    config = small_config(
        num_hidden_layers=3, num_key_value_heads=1, mixer={"use_conv": False, "lambda_init": 1.0},
        layer_priors=["softmax", {"window": 5, "n_kv_head": 2}, {"use_conv": True}],
    )  # fmt: skip
    first, second, third = config.mixer_configs()
    assert [first.window, second.window, third.window] == [None, 5, None]
    assert [first.n_kv_head, second.n_kv_head, third.n_kv_head] == [1, 2, 1]
    assert [first.use_conv, second.use_conv, third.use_conv] == [False, False, True]
    assert first.lambda_init == second.lambda_init == third.lambda_init == 1.0


def test_swiglu_follows_the_width_unless_given():
    assert FEMConfig(hidden_size=1024, num_attention_heads=16, num_hidden_layers=1).intermediate_size == 2816
    assert FEMConfig(hidden_size=2048, num_attention_heads=32, num_hidden_layers=1).intermediate_size == 5632


def test_words_of_transformers_and_fields_that_other_programs_wrote_into_a_file_are_kept(tmp_path):
    config = small_config(num_labels=3, attn_implementation=None, output_attentions=False, temperature=0.5)
    config.written_by = "another program"
    config.save_pretrained(tmp_path)
    for one in (config, AutoConfig.from_pretrained(tmp_path)):
        assert (one.num_labels, one.written_by) == (3, "another program")


@pytest.mark.parametrize("size, parameters", [("tiny", 1.33e6), ("340m", 341e6), ("1.3b", 1.30e9)])
def test_presets_have_the_parameters_of_their_transformer(size, parameters):
    transformer = count_parameters(preset(f"transformer-{size}"))
    assert transformer == pytest.approx(parameters, rel=0.01)
    for family in FAMILIES:
        assert count_parameters(preset(f"{family}-{size}")) == pytest.approx(transformer, rel=5e-3), family


STARTS = [(start, prior) for start in ("slim", "split") for prior in ("softmax", "gla")]


@pytest.mark.parametrize("start, prior", [*STARTS, *(("paper", prior) for prior in ("mamba", "rnn_softmax", "gla"))])
def test_presets_have_the_starting_points_of_the_layer_under_their_names(start, prior):
    layer = getattr(FreeEnergyMixerConfig, start)(1024, 16, prior)
    config = preset(f"fem-{'sm' if prior == 'softmax' else prior}-{start}-340m", mlp="kept")
    assert config.mixer_configs() == [layer] * 24
    assert config.intermediate_size == 2816
    assert layer.gate_rank == (None if start == "paper" else 64)


def test_counted_parameters_are_those_of_the_model():
    config = preset("fem-sm-tiny", vocab_size=211, num_hidden_layers=2)
    assert count_parameters(config) == sum(p.numel() for p in FEMForCausalLM(config).parameters())


def test_preset_changes_reach_the_mixers_and_keep_the_parameters():
    config = preset("fem-sm-tiny", vocab_size=499, mixer={"use_conv": False})
    assert not config.mixer_configs()[0].use_conv
    assert config.vocab_size == 499
    like = preset("transformer-tiny", vocab_size=499)
    assert count_parameters(config) == pytest.approx(count_parameters(like), rel=5e-3)
    assert not like.mixer_configs()[0].use_lse
