"""Models served by an engine's own attention and cache, by continuous batching and over processes: what they read is
what the exact form reads. Rows split over one process are nothing but the model.
"""

from __future__ import annotations

import ast
import inspect
import json
import shutil
import textwrap
import warnings
from itertools import cycle
from pathlib import Path

import pytest
import split_models
import torch
from own_priors import MeanPrior, register
from processes import torchrun
from small_models import left_padded, lively, small_config, tokens
from torch import nn
from transformers import ContinuousBatchingConfig, DynamicCache, GenerationConfig

from fem import FreeEnergyMixer, FreeEnergyMixerConfig
from fem.models import FEMCache, FEMConfig, FEMForCausalLM
from fem.models.context import context_parallel, own_part
from fem.models.loss import next_tokens
from fem.models.modeling import FEMBlock
from fem.ops.softmax.cached import REACH
from fem.priors import OperatorPrior

FAMILIES = {
    "full": {},
    "grouped": {"num_key_value_heads": 2},
    "one_key_head": {"num_key_value_heads": 1},
    "window": {"mixer": {"window": 5}},
    "window_in_one_layer": {"layer_priors": [{"prior_type": "softmax", "window": 5}, "softmax"]},
    "slim_gates": {"mixer": {"gate_rank": 4}},
    "one_gate_a_head": {"mixer": {"gate_rank": 0}},
    "split": {"mixer": {"free_share": 0.5, "gate_rank": 4}},
    "split_grouped": {"num_key_value_heads": 2, "mixer": {"free_share": 0.25}},
    "free_energy_of_all": {"mixer": {"free_share": 1.0}},
    "capped": {"mixer": {"value_logexp_cap": 2.0}},
    "no_rope": {"mixer": {"use_rope": False}},
    "free_energy_alone": {"mixer": {"use_temperature": False, "use_lse": True}},
    "conditioner": {"mixer": {"use_conv": True}},
    "gate_and_conditioner": {"mixer": {"use_conv": True, "use_temperature": False, "use_lse": False, "gate_rank": 4}},
    "plain_attention": {"mixer": {"use_temperature": False, "use_lse": False, "use_outer_gate": False}},
    "other_scores": {"prior_type": "cosine", "num_key_value_heads": 2},
}
slow = lambda test: pytest.mark.slow(pytest.mark.timeout(900)(test))  # noqa: E731


def small_model(mixer: dict | None = None, **fields) -> FEMForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 64}
    config = small_config(**sizes | fields, mixer={"use_conv": False, **(mixer or {})})
    return lively(FEMForCausalLM(config), size=0.2)


def served(model: FEMForCausalLM, engine: str, *args, **how):
    """model(*args, **how) by an engine; the model is in its exact form again afterwards."""
    model.set_attn_implementation(engine)
    try:
        return model(*args, **how)
    finally:
        model.set_attn_implementation("exact")


@pytest.mark.parametrize(("family", "engine"), [*zip(FAMILIES, cycle(["sdpa", "eager"])), ("full", "eager")])
def test_logits_and_tokens_of_an_engine_are_those_of_the_exact_read(family, engine, monkeypatch):
    register(monkeypatch)
    model, ids = small_model(**FAMILIES[family]), tokens(3, 13)
    mask = left_padded(13, 13, 9, 1)
    how = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "attention_mask": mask}
    with torch.no_grad():
        exact, written = model(ids, attention_mask=mask).logits, model.generate(ids, **how)
        logits = served(model, engine, ids, attention_mask=mask).logits
        model.set_attn_implementation(engine)
        assert torch.equal(model.generate(ids, **how), written)
    assert logits.isfinite().all()
    torch.testing.assert_close(logits[mask.bool()], exact[mask.bool()], rtol=1e-4, atol=1e-4)


def test_a_softmax_of_other_scores_has_grouped_heads_and_a_length_of_its_own(monkeypatch):
    register(monkeypatch)
    assert small_model(**FAMILIES["other_scores"]).model.layers[0].mixer.config.kv_heads == 2
    assert FEMConfig(vocab_size=9, prior_type="cosine").max_position_embeddings == 4096


def test_a_model_reads_exactly_unless_an_engine_is_named():
    model = small_model()
    assert model.config._attn_implementation == "exact"
    assert isinstance(model(tokens(1, 3), use_cache=True).past_key_values, FEMCache)
    assert isinstance(served(model, "sdpa", tokens(1, 3), use_cache=True).past_key_values, DynamicCache)
    with pytest.raises(TypeError, match="states of FEM layers"):
        served(model, "sdpa", tokens(1, 3), past_key_values=model(tokens(1, 3), use_cache=True).past_key_values)


def test_an_engine_of_ones_own_is_given_keys_and_values_of_one_width():
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

    calls = []

    def of_mine(module, q, k, v, mask, **how):
        calls.append((q.shape, k.shape, v.shape, module.layer_idx, how["scaling"]))
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, q, k, v, mask, **how)

    AttentionInterface.register("of_mine", of_mine)
    model = small_model(num_key_value_heads=2)
    ids = tokens(1, 7)
    torch.testing.assert_close(served(model, "of_mine", ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)
    width, mixer = model.config.head_dim, model.model.layers[0].mixer.config
    assert width == 32 > 2 * mixer.value_width > mixer.key_width  # grouped keys leave room for wider values
    shapes = (1, 4, 7, width), (1, 2, 7, width), (1, 2, 7, width)
    wanted = [(*shapes, layer, mixer.key_width**-0.5) for layer in range(2)]
    assert [(*map(tuple, call[:3]), *call[3:]) for call in calls] == wanted


def test_vllm_finds_the_attention_in_the_source_of_a_block():
    """It asks for one lookup in transformers' interface and one call of what was found, and reads the scale off it."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(FEMBlock.forward))))
    assigned = [node for node in ast.walk(tree) if isinstance(node, ast.Assign)]
    lookups = [node for node in assigned if ast.unparse(node.value).startswith("ALL_ATTENTION_FUNCTIONS.")]
    found = [node.targets[0].id for node in lookups]
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) in found]
    assert len(found) == len(calls) == 1
    assert [ast.unparse(word.value) for word in calls[0].keywords if word.arg == "scaling"] == ["self.scaling"]


@pytest.mark.parametrize(("width", "heads"), [(32, 4), (384, 8), (320, 4), (512, 8)])
def test_split_values_keep_the_head_and_the_cache_of_attention(width, heads):
    """Heads of 8, 48, 80 and 64: no engine is asked to pad them, though values are a little narrower than keys."""
    sizes = {"vocab_size": 9, "hidden_size": width, "num_attention_heads": heads, "num_hidden_layers": 1}
    attention = FEMConfig(**sizes, mixer={"use_conv": False} | FAMILIES["plain_attention"]["mixer"])
    split = FEMConfig(**sizes, mixer={"use_conv": False, "free_share": 0.5, "gate_rank": max(1, width // 16)})
    mixer = split.mixer_configs()[0]
    assert split.head_dim == attention.head_dim == width // heads == mixer.key_width
    assert 0.8 * mixer.key_width < mixer.read_width == mixer.value_width <= mixer.key_width
    caches = []
    for config in (split, attention):
        model = FEMForCausalLM(config).eval()
        layer = served(model, "sdpa", torch.ones(2, 3, dtype=torch.long), use_cache=True).past_key_values.layers[0]
        caches.append((layer.keys.nbytes, layer.values.nbytes))
    assert caches[0] == caches[1]


@pytest.mark.parametrize(
    "fields, reason",
    [
        ({"mixer": {"use_conv": True, "window": 5}}, "layer 0 has a window and the conditioner"),
        ({"mixer": {"window": 1}}, "layer 0 has a window of 1"),
        ({"layer_priors": ["softmax", "gla"]}, "layer 1 has the 'gla' prior"),
        ({"prior_type": "mean_alone", "num_key_value_heads": 2}, "layer 0 has the 'mean_alone' prior, which is not an"),
        ({"layer_priors": [{"prior_type": "softmax", "window": 3 + i} for i in range(2)]}, "windows of 3 and 4"),
        ({"layer_priors": ["softmax", {"prior_type": "softmax", "n_kv_head": 1}]}, "numbers of key heads"),
    ],
)
def test_what_no_engine_serves_says_why_and_stays_exact(fields, reason, monkeypatch):
    register(monkeypatch)
    model = small_model(**fields)
    assert not model._supports_flash_attn
    assert not model._supports_attention_backend
    with pytest.raises(ValueError, match=f"cannot serve this model: .*{reason}"):
        model.set_attn_implementation("sdpa")
    assert model(tokens(1, 3)).logits.isfinite().all()


@torch.no_grad()
def test_queries_and_keys_of_another_width_are_refused_by_an_engine(monkeypatch):
    register(monkeypatch)
    model, ids = small_model(prior_type="wide"), tokens(1, 3)
    assert model(ids).logits.isfinite().all()
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match=r"of the prior 'wide' must be 8 wide .* got 9 and 9"):
        model(ids)


@pytest.mark.parametrize("engine", ["sdpa", "eager"])
@pytest.mark.parametrize("said", ["positions", "segments"])
@torch.no_grad()
def test_documents_of_an_engine_stay_apart_however_they_are_said(engine, said):
    """A model that is not in training makes a cache by itself, and collators add a mask of ones."""
    model, ids = small_model(), tokens(1, 9)
    lengths = torch.tensor([4, 5])
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    segments = torch.arange(2).repeat_interleave(lengths)[None]
    documents = {"position_ids": positions} if said == "positions" else {"segment_ids": segments}
    wanted = model(ids, labels=ids, segment_ids=segments)
    ones = torch.ones_like(ids)
    ways = [{}, {"attention_mask": ones}, {"attention_mask": ones.bool(), "labels": ids}, {"use_cache": False}]
    if (engine, said) == ("sdpa", "positions"):  # a mask of pairs says itself what a token sees
        pairs = (segments.mT == segments) & torch.ones(9, 9, dtype=torch.bool).tril()
        ways.append({"attention_mask": pairs[None, None], "labels": ids})
    for how in ways:
        found = served(model, engine, ids, **documents, **how)
        torch.testing.assert_close(found.logits, wanted.logits, rtol=1e-4, atol=1e-4)
        if "labels" in how:
            torch.testing.assert_close(found.loss, wanted.loss, rtol=1e-4, atol=1e-4)
    hidden = ones.clone()
    hidden[0, 0] = 0
    for how in ({"attention_mask": hidden}, {"use_cache": True}, {"past_key_values": DynamicCache()}):
        with pytest.raises(ValueError, match=r"packed documents \(segment_ids, or position_ids that restart\)"):
            served(model, engine, ids, **documents, **how)


def test_gradients_through_an_engine_are_those_of_the_exact_read():
    model, ids = small_model(num_key_value_heads=2).train(), tokens(2, 12)
    found = []
    for engine in ("exact", "sdpa"):
        model.zero_grad()
        served(model, engine, ids, labels=ids).loss.backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    for name, grad in found[0].items():
        torch.testing.assert_close(found[1][name], grad, rtol=1e-4, atol=1e-4 * grad.abs().max().item(), msg=name)


def test_an_engine_is_mapped_over_rows():
    model, ids = small_model(), tokens(2, 7)
    read = lambda row: served(model, "sdpa", row[None], use_cache=False).logits[0]  # noqa: E731
    torch.testing.assert_close(torch.func.vmap(read)(ids), model(ids).logits, rtol=1e-4, atol=1e-4)


def shifted_values(reach: float, **fields) -> FEMForCausalLM:
    """A model with biases on its values that bring beta v to about `reach` nats."""
    model = small_model(**fields)
    with torch.no_grad():
        for block in model.model.layers:
            beta = block.mixer.beta()
            bias = block.mixer.value.bias.view(len(beta), -1)[:, -beta.shape[1] :]
            bias.copy_(reach / beta * torch.where(torch.rand(beta.shape) < 0.5, -1, 1))
    return model


@pytest.mark.parametrize("reach", [20.0, 70.0])
def test_an_engine_is_right_up_to_its_range(reach):
    model, ids = shifted_values(reach), tokens(2, 12)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        logits = served(model, "sdpa", ids).logits
    assert reach < model.model.layers[0].largest < REACH[torch.float32]
    torch.testing.assert_close(logits, model(ids).logits, rtol=1e-4, atol=1e-4)


def test_a_model_built_on_the_meta_device_and_loaded_by_assignment_is_served():
    with torch.device("meta"):
        model = FEMForCausalLM(small_model().config).eval()
    for _ in range(2):
        model.load_state_dict(small_model().state_dict(), assign=True)
        torch.testing.assert_close(served(model, "sdpa", tokens(2, 5)).logits, model(tokens(2, 5)).logits)
        assert served(model.to("meta"), "sdpa", tokens(2, 5).to("meta")).logits.is_meta


@pytest.mark.parametrize("family", ["full", "split_grouped"])
def test_beyond_the_range_the_clip_is_reported(family):
    model, ids = shifted_values(150.0, **FAMILIES[family]), tokens(2, 12)
    exact = model(ids).logits
    with pytest.warns(UserWarning, match="e is clipped there"):
        clipped = served(model, "sdpa", ids).logits
    assert (clipped - exact).abs().max() > 1e-2


def test_bfloat16_of_an_engine_errs_at_most_twice_as_far_as_plain_attention():
    """The "2x" rule over a whole model: both forms in bfloat16 against the exact one in float64."""
    ids, errors = tokens(4, 40), []
    for fields in ({}, FAMILIES["plain_attention"]):
        model = small_model(**fields)
        right = small_model(**fields).double()(ids).logits
        half = served(model.bfloat16(), "sdpa", ids).logits
        errors.append(((half - right).norm() / right.norm()).item())
    assert errors[0] <= 2 * errors[1]


@slow
@pytest.mark.parametrize("engine", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["full", "grouped", "window", "window_in_one_layer", "slim_gates", "split"])
def test_continuous_batching_writes_what_generate_writes(family, engine):
    """Prompts of 1 to 30 tokens, prefilled in chunks of at most 24 tokens: rows join and end while others run."""
    model, of = small_model(**FAMILIES[family]), torch.Generator().manual_seed(2)
    prompts = [torch.randint(1, 53, (n,), generator=of).tolist() for n in (1, 17, 5, 30, 3, 11)]
    how = GenerationConfig(max_new_tokens=12, do_sample=False, eos_token_id=7, pad_token_id=0)
    written = [model.generate(torch.tensor([p]), generation_config=how)[0, len(p) :].tolist() for p in prompts]
    model.set_attn_implementation(engine)
    small = ContinuousBatchingConfig(num_blocks=32, max_batch_tokens=24)
    done = model.generate_batch(prompts, generation_config=how, continuous_batching_config=small, progress_bar=False)
    numbered = sorted(done.items(), key=lambda item: int(item[0].rsplit("_", 1)[1]))
    assert [request.generated_tokens for _, request in numbered] == written


@slow
@pytest.mark.skipif(not shutil.which("g++"), reason="FlexAttention on a CPU is compiled by g++")
def test_flex_attention_reads_what_the_exact_form_reads():
    model, ids = small_model(), tokens(2, 13)
    mask = left_padded(13, 13, 9)
    with torch.no_grad():
        exact, flex = model(ids, attention_mask=mask).logits, served(model, "flex_attention", ids, attention_mask=mask)
    torch.testing.assert_close(flex.logits[mask.bool()], exact[mask.bool()], rtol=1e-4, atol=1e-4)


def on_processes(what: str, processes: int, folder: Path) -> dict:
    """What tests/support/split_models.py finds under torchrun."""
    torchrun(processes, split_models.__file__, what, str(folder))
    return json.loads((folder / "found.json").read_text())


@slow
@pytest.mark.parametrize("processes", [2, 4])
def test_a_model_split_by_heads_reads_and_learns_as_one(processes, tmp_path):
    for name, found in on_processes("heads", processes, tmp_path).items():
        for what in ("logits", "loss", "weights"):
            assert found[what] < 1e-5, (name, what, found)
        assert found["same names"], name
        whole = "mamba" in name  # its mixers share B and C, and stay whole
        assert found["share"] < (0.95 if whole else 1 / processes + 0.15), (name, found)


@slow
@pytest.mark.parametrize("processes", [2, 4])
def test_rows_split_over_processes_are_read_and_learnt_from_as_whole_ones(processes, tmp_path):
    """Every prior, with the conditioner and without; padding, documents, a window, recomputed activations."""
    for name, found in on_processes("rows", processes, tmp_path).items():
        limit = 4e-5 if name == "decay per channel" else 1e-5  # float32 errs by 1e-5 there in one process
        assert max(found.values()) < limit, (name, found)


@pytest.mark.parametrize("prior", ["softmax", "gla"])
def test_one_part_is_the_whole_row_and_afterwards_the_model_is_as_before(prior, mesh):
    model, ids = small_model({"use_conv": True}, prior_type=prior), tokens(2, 9)
    wanted = model(ids).logits
    with context_parallel(model, mesh):
        assert torch.allclose(model(own_part(ids, mesh), use_cache=False).logits, wanted, atol=1e-5)
    assert torch.equal(model(ids).logits, wanted)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    model.generate(ids, max_new_tokens=2, pad_token_id=0)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"labels": tokens(1, 4)}, "pass shift_labels"),
        ({"position_ids": torch.arange(4)[None]}, "mark documents by segment_ids"),
        ({"by place": (None, torch.arange(4)[None])}, "mark documents by segment_ids"),
        ({"use_cache": True}, "use_cache=False"),
        ({"shift_labels": next_tokens(tokens(1, 4)), "engine": "sdpa"}, "exact form"),
    ],
)
def test_what_a_part_cannot_be_given_is_refused(given, said, mesh):
    model, given = small_model(), dict(given)
    model.set_attn_implementation(given.pop("engine", "exact"))
    with context_parallel(model, mesh), pytest.raises(ValueError, match=said):
        model(tokens(1, 4), *given.pop("by place", ()), **given)


def layer(prior=None, **fields) -> FreeEnergyMixer:
    return FreeEnergyMixer(FreeEnergyMixerConfig(n_embd=16, n_head=2, **fields), prior)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (layer(causal=False), "causal=False"),
        (layer(OperatorPrior(lambda x: x.cumsum(1)), use_conv=False), "no state"),
        (
            layer(MeanPrior(FreeEnergyMixerConfig(n_embd=16, n_head=2))),
            "MeanPrior reads keys and values in a way of",
        ),
        (nn.Sequential(layer(), nn.Linear(16, 16)), "Sequential"),
    ],
)
def test_a_model_that_cannot_read_parts_is_refused(model, said, mesh):
    with pytest.raises(ValueError, match=said), context_parallel(model, mesh):
        pass


def test_parts_have_one_length(mesh, monkeypatch):
    monkeypatch.setattr(type(mesh), "size", lambda self: 3)
    with pytest.raises(ValueError, match="10 tokens cannot be cut into 3 equal parts"):
        own_part(tokens(1, 10), mesh)
