"""Attention replaced in a model that exists: what stays the same, what can be trained, what is refused."""

from __future__ import annotations

import copy
import pickle
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial, wraps
from itertools import cycle

import pytest
import torch
import torch.nn.functional as F
from clients.survey import build
from layers import some_pairs
from originals import DECODERS, PADDED, Attention, bert, close, decoder, lively, vision
from processes import printed
from small_models import VOCABULARY, awake, small_config, tokens
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from fem import replace_attention
from fem.models import FEMForCausalLM
from fem.models.engines.attention import SPLITTING
from fem.models.surgery.head import FreeEnergyHead
from fem.models.surgery.pretrained import RUNNING


def encoder(batch_first: bool = True) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(32, 4, 48, batch_first=batch_first, dropout=0.0)
    return lively(nn.TransformerEncoder(layer, 2, enable_nested_tensor=batch_first))


# --- preserve=True: the same function


WAYS = [(None, "sdpa"), (PADDED, "eager"), (PADDED, "sdpa"), (None, "eager")]
HOSTS = {name: partial(decoder, name) for name in DECODERS} | {"bert": bert}
PICTURES = {name: partial(vision, name) for name in ("ViT", "DeiT")}


@pytest.mark.parametrize("name, way", [*some_pairs(HOSTS, WAYS, 2), *((name, WAYS[0]) for name in PICTURES)])
def test_replaced_model_computes_what_it_did(name, way):
    model, (mask, implementation) = (HOSTS | PICTURES)[name](), way
    model.set_attn_implementation(implementation)
    pixels = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    given = {"pixel_values": pixels} if name in PICTURES else {"input_ids": tokens(), "attention_mask": mask}
    before, after = model(**given).logits, replace_attention(model)(**given).logits
    kept = slice(None) if mask is None else PADDED.bool()
    assert not torch.equal(after, before)
    close(after[kept], before[kept])


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("mask", ["none", "padding", "causal", "both"])
@pytest.mark.parametrize("batch_first", [True, False])
def test_replaced_encoder_computes_what_it_did(training, mask, batch_first):
    model = encoder(batch_first).train(training)
    x = torch.randn(3, 7, 32)
    padding = torch.arange(7) >= torch.tensor([[7], [4], [1]]) if mask in ("padding", "both") else None
    options = {"src_key_padding_mask": padding}
    if mask in ("causal", "both"):
        options["mask"] = nn.Transformer.generate_square_subsequent_mask(7)
    x_in = x if batch_first else x.transpose(0, 1)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = model(x_in, **options)
        after = replace_attention(model)(x_in, **options)
    kept = torch.ones(3, 7, dtype=torch.bool) if padding is None else ~padding
    close(*((y if batch_first else y.transpose(0, 1))[kept] for y in (after, before)))


@pytest.mark.parametrize("layers", [None, [1]])
def test_fast_path_of_an_encoder_reads_the_free_energy_too(layers):
    model = awake(replace_attention(encoder(), layers=layers))
    x = torch.randn(2, 7, 32)
    padding = torch.arange(7) >= torch.tensor([[7], [4]])
    with torch.no_grad():
        fast = model.eval()(x, src_key_padding_mask=padding)
        slow = model.train()(x, src_key_padding_mask=padding)
    close(fast[~padding], slow[~padding], 1e-5)


def test_replaced_decoder_layer_keeps_its_cross_attention():
    model = lively(nn.TransformerDecoderLayer(32, 4, 48, batch_first=True))
    x, memory = torch.randn(2, 5, 32), torch.randn(2, 7, 32)
    causal = nn.Transformer.generate_square_subsequent_mask(5)
    before = model(x, memory, tgt_mask=causal, tgt_is_causal=True)
    close(replace_attention(model)(x, memory, tgt_mask=causal, tgt_is_causal=True), before)
    assert type(model.multihead_attn) is nn.MultiheadAttention
    assert isinstance(model.self_attn.free_energy, FreeEnergyHead)


MASKS = {"causal": torch.ones(5, 5, dtype=torch.bool).triu(1), "of each head": torch.linspace(-2, 2, 200).view(8, 5, 5)}


WITHOUT_TRANSFORMERS = """
import sys
sys.modules["transformers"] = None
import torch, fem
attention, x = fem.replace_attention(torch.nn.MultiheadAttention(32, 4)), torch.randn(5, 2, 32)
print(type(attention).__name__, *attention(x, x, x)[0].shape)
"""


@pytest.mark.slow
def test_multihead_attention_is_replaced_where_transformers_is_not_installed():
    assert printed("-c", WITHOUT_TRANSFORMERS) == "FreeEnergyMultiheadAttention 5 2 32\n"


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("shape, mask", [((2, 5, 32), "causal"), ((5, 32), "causal"), ((2, 5, 32), "of each head")])
@pytest.mark.parametrize("bias", [True, False])
def test_replaced_multihead_attention_returns_output_and_weights(shape, mask, average, bias):
    model = lively(nn.MultiheadAttention(32, 4, batch_first=True, bias=bias))
    x = torch.randn(shape)
    options = {"average_attn_weights": average, "attn_mask": MASKS[mask]}
    before = model(x, x, x, **options)
    after = replace_attention(model)(x, x, x, **options)
    close(after[0], before[0])
    close(after[1], before[1], 1e-6)


@pytest.mark.parametrize("mask", [None, torch.ones(5, 5, dtype=torch.bool).tril()], ids=["whole", "masked"])
def test_replaced_timm_block_computes_what_it_did(mask):
    block, x = lively(nn.Sequential(*2 * [Attention()])), torch.randn(2, 5, 32)
    before, names = block[0](x, mask), set(block.state_dict())
    replace_attention(block)
    assert block[1] is block[0]  # a second layer shares it
    close(block[0](x, mask), before)
    assert names <= set(block.state_dict())


# --- the parameters: kept by name and identity, new ones trainable


@pytest.mark.parametrize("name", DECODERS)
def test_original_keeps_its_parameters_and_their_names(name):
    causal_model = decoder(name)
    before = dict(causal_model.named_parameters())
    after = dict(replace_attention(causal_model).named_parameters())
    assert all(after[name] is parameter for name, parameter in before.items())
    assert all(".free_energy." in name for name in after.keys() - before.keys())


@pytest.mark.parametrize("build", [lambda: decoder("llama"), bert, encoder], ids=["llama", "bert", "encoder"])
def test_every_new_parameter_has_a_gradient(build):
    model = replace_attention(build(), lambda_init=-2.0).train()
    x = torch.randn(2, 5, 32) if isinstance(model, nn.TransformerEncoder) else tokens(2, 5)
    out = model(x)
    (out if torch.is_tensor(out) else out.logits).square().mean().backward()
    new = {name: p for name, p in model.named_parameters() if ".free_energy." in name}
    assert new
    assert [name for name, p in new.items() if p.grad is None or not p.grad.any()] == []


def test_lambda_starts_small_and_the_gate_at_one():
    head = replace_attention(decoder("llama")).model.layers[0].self_attn.free_energy
    lambda_, gate = head.gate.factors(torch.randn(2, 5, 32))
    assert lambda_.max() < 1e-4
    close(gate, torch.ones_like(gate), 1e-5)


@pytest.mark.parametrize("rank", [0, 4])
def test_slim_gates_start_as_the_original_and_learn(rank):
    model = decoder("llama")
    before = model(tokens()).logits
    replace_attention(model, gate_rank=rank, lambda_init=-6.0)
    close(model(tokens()).logits, before, 0.05)
    new = {name: p for name, p in model.named_parameters() if ".free_energy." in name}
    optimizer = torch.optim.SGD(new.values(), lr=0.1)
    for _ in range(2):  # the second maps start at 0, so the first ones have a gradient from the second step on
        optimizer.zero_grad()
        model(tokens()).logits.square().mean().backward()
        optimizer.step()
    assert [name for name, p in new.items() if p.grad is None or not p.grad.any()] == []


def test_switches_leave_parts_out():
    head = replace_attention(decoder("gpt2"), use_temperature=False).transformer.h[0].attn.free_energy
    assert head.beta is None
    assert head.gate.inner is None
    assert head.gate.outer is not None


def test_new_parameters_take_dtype_and_mode_of_the_original():
    model = replace_attention(decoder("llama").bfloat16().train())
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert all(module.training for module in model.modules())
    assert model(tokens()).logits.isfinite().all()


class EightBits(nn.Linear):
    """A map that a library has quantised: the weight holds whole numbers, and only forward knows what they mean."""

    def __init__(self, map_: nn.Linear):
        super().__init__(map_.in_features, map_.out_features, bias=False)
        self.step = map_.weight.detach().abs().amax() / 127
        self.weight = nn.Parameter((map_.weight.detach() / self.step).round().to(torch.int8), requires_grad=False)

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype) * self.step)


def test_new_parameters_of_a_quantised_model_take_the_dtype_it_computes_in():
    model = decoder("llama").double()
    for layer in model.model.layers:
        for name, map_ in list(layer.self_attn.named_children()):
            setattr(layer.self_attn, name, EightBits(map_))
    before = model(tokens()).logits
    head = replace_attention(model).model.layers[0].self_attn.free_energy
    assert {p.dtype for p in head.parameters()} == {torch.float64}
    close(model(tokens()).logits, before)


def test_gradient_checkpointing_changes_no_gradient():
    model = awake(replace_attention(decoder("llama"))).train()
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.zero_grad()
        model(tokens(), labels=tokens()).loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_multihead_attention_has_its_gradient(reentrant):
    model, x = awake(replace_attention(nn.MultiheadAttention(32, 4))), torch.randn(5, 2, 32, requires_grad=True)
    checkpoint(model, x, x, x, use_reentrant=reentrant)[0].square().sum().backward()
    torch.testing.assert_close(*torch.autograd.grad(model(x, x, x)[0].square().sum(), x), x.grad)


@pytest.mark.parametrize("layers, replaced", [([0], [0]), ([-1], [2]), ((2, 0), [0, 2])])
def test_layers_selects_what_is_replaced(layers, replaced):
    model = replace_attention(decoder("llama"), layers=layers)
    assert [i for i, layer in enumerate(model.model.layers) if hasattr(layer.self_attn, "free_energy")] == replaced


# --- generate, copies, files


CACHES = [("dynamic", PADDED, 1), ("dynamic", PADDED, 3), ("static", torch.ones_like(PADDED), 1)]
FRESH = [("gpt2", "softmax", 2), ("mistral", "gla", 1), ("gpt_bigcode", "rnn_softmax", 1), ("mistral", "mamba", 2)]
CACHED = {name: (name, {}, *way) for name, way in zip(DECODERS, cycle(CACHES))} | {
    f"{name}, fresh {prior}": (name, {"prior_type": prior, "preserve": False}, None, PADDED, beams)
    for name, prior, beams in FRESH
}


@pytest.mark.parametrize("kind", CACHED)
def test_generate_with_a_cache_equals_generate_without(kind):
    """GPTBigCode calls the cache by an older name."""
    name, fields, cache, mask, beams = CACHED[kind]
    model = awake(lively(replace_attention(decoder(name), **fields)))
    options = {"max_new_tokens": 4, "do_sample": False, "num_beams": beams, "attention_mask": mask}
    cached = model.generate(tokens(), cache_implementation=cache, disable_compile=True, **options)
    torch.testing.assert_close(cached, model.generate(tokens(), use_cache=False, **options))


@pytest.mark.parametrize(
    "build, preserve, prior",
    [(lambda: decoder("gpt2"), True, "softmax"), (lambda: decoder("gpt2"), False, "gla"), (encoder, True, "softmax")],
)
@pytest.mark.parametrize("make_copy", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copy_is_a_model_of_its_own(build, make_copy, preserve, prior):
    model = awake(replace_attention(build(), prior, preserve=preserve))
    x = torch.randn(2, 5, 32) if isinstance(model, nn.TransformerEncoder) else tokens(2, 5)
    answer = lambda m: m(x) if isinstance(m, nn.TransformerEncoder) else m(x).logits  # noqa: E731
    before = answer(model)
    other = make_copy(model)
    if hasattr(model, "config"):  # of the same kind, as peft and others look it up
        assert (type(other.config), other.config.model_type) == (type(model.config), model.config.model_type)
    torch.testing.assert_close(answer(other), before)
    lively(other, seed=3)
    torch.testing.assert_close(answer(model), before)


def siglip() -> nn.Module:
    """Its attention hands nothing on to its attention function."""
    return build("siglip_vision_model")


@pytest.mark.parametrize("name", ["llama", "siglip", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_replaced_model_is_one_graph(name, as_users_run):
    model = awake(replace_attention(siglip() if name == "siglip" else decoder(name)))
    given = {"pixel_values": torch.randn(1, 3, 32, 32)} if name == "siglip" else {"input_ids": tokens()}
    how = {} if name == "siglip" else {"use_cache": False}
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    close(compiled(**given, **how)[0], model(**given)[0], 1e-5)


def test_a_compiled_model_is_not_compiled_to_be_compared():
    compiled, model = [], decoder("llama")
    model.compile(backend=lambda graph, _: compiled.append(graph) or graph)
    replace_attention(model)
    assert compiled == []


def test_threads_keep_their_features_apart():
    model = lively(replace_attention(siglip(), lambda_init=0.0))
    images = [torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    call = lambda image: [model(image).last_hidden_state for _ in range(20)]  # noqa: E731
    wanted = [call(image)[0] for image in images]
    with ThreadPoolExecutor(4) as pool:
        for found, one in zip(pool.map(torch.no_grad()(call), images), wanted):
            for each in found:
                close(each, one, 1e-5)


# --- refusals


def read_twofold(attention: nn.Module) -> None:
    """Let it compute twice what its attention function reads, but not what another function reads."""
    read = attention.forward
    own = lambda: 2.0 if attention.config._attn_implementation == "sdpa" else 1.0  # noqa: E731
    twofold = lambda y: (own() * y[0], None) if isinstance(y, tuple) else own() * y  # noqa: E731
    attention.forward = wraps(read)(lambda *args, **kwargs: twofold(read(*args, **kwargs)))


@pytest.mark.parametrize("training", [True, False])
def test_an_attention_that_would_compute_something_else_is_refused_and_stays(training):
    model = decoder("llama").train(training)
    read_twofold(model.model.layers[1].self_attn)
    before, parts, drawn = model(tokens()).logits, [*model.state_dict()], torch.get_rng_state()
    with pytest.raises(ValueError, match=r"model.layers.1.self_attn \(LlamaAttention\): .* differs by 5e-01"):
        replace_attention(model)
    assert [*model.state_dict()] == parts
    assert model.training is training
    assert torch.equal(torch.get_rng_state(), drawn)
    torch.testing.assert_close(model(tokens()).logits, before)
    replace_attention(model, layers=[0, 2])


@pytest.mark.parametrize("model_type", ["clip", "llava", "wav2vec2", "qwen2_vl"])
def test_attentions_that_random_tokens_do_not_reach_are_run_and_compared_too(model_type):
    """CLIP runs on words and pictures together only, and random tokens show LLaVA no picture."""
    model = build(model_type)
    read = [m for m in model.modules() if type(m).__name__ in ("CLIPAttention", "Wav2Vec2Attention", "VisionAttention")]
    read_twofold(read[-1])
    with pytest.raises(ValueError, match=r"[12]\.\w+ \((CLIP|Wav2Vec2|Vision)Attention\): .* differs by 5e-01"):
        replace_attention(model)


def test_unknown_attention_beside_known_needs_layers():
    class OddAttention(nn.Module):
        pass

    model = nn.ModuleDict({"odd": OddAttention(), "plain": encoder()})
    with pytest.raises(ValueError, match=r"odd \(OddAttention\)"):
        replace_attention(model)
    replace_attention(model, layers=[0])
    assert isinstance(model["plain"].layers[0].self_attn.free_energy, FreeEnergyHead)


@pytest.mark.parametrize("preserve, kernel, what, words", [
    *((keep, "flash_attention_2", "documents", "must show the documents of position_ids") for keep in (True, False)),
    *((keep, "flash_attention_2", "lengths", "must show the documents of position_ids") for keep in (True, False)),
    *((keep, "flex_attention", "window", "must have 4 dimensions, got BlockMask") for keep in (True, False)),
    (True, "flash_attention_2", "window", "must show the window of 5 tokens, got None"),  # a fresh mixer has it itself
])  # fmt: skip
def test_what_a_kernel_reads_beside_its_mask_is_refused(preserve, kernel, what, words):
    """As on a card, where flash attention makes no mask."""
    model = decoder("mistral" if what == "window" else "llama")
    model.config._attn_implementation = kernel
    replace_attention(model, preserve=preserve)
    restarts = torch.cat([torch.arange(4), torch.arange(7)])[None]
    documents = {"position_ids": restarts, "use_cache": False}
    lengths = {"cu_seq_lens_q": torch.tensor([0, 4, 11]), "use_cache": False}
    how = {"documents": documents, "lengths": lengths, "window": {}}[what]
    with pytest.raises(ValueError, match=words), torch.compiler.set_stance("force_eager"):  # or masks are compiled
        model(tokens(1, 11), **how)


def test_a_replaced_model_has_shapes_without_values():
    with torch.device("meta"):
        model = replace_attention(decoder("llama"))
    assert model(torch.zeros(1, 11, dtype=torch.long, device="meta")).logits.shape == (1, 11, VOCABULARY)


@pytest.mark.parametrize(
    "fields, name",
    [
        ({"prior_type": "gla"}, "preserve=False"),
        ({"fem_dim": 16}, "fem_dim"),
        ({"causal": False}, "causal"),
        ({"use_conv": True}, "use_conv"),
        ({"free_share": 0.5}, "free_share changes what the original computes"),
        ({"use_temperature": False, "use_lse": True}, "use_temperature"),
        ({"layers": [3]}, "layers.*below 3"),
        ({"layers": [True]}, "layers"),
        ({"layers": 3}, "layers must be a list of indices"),
        ({"layers": []}, "layers must be a list of indices"),
        ({"layers": [0, 0]}, "layers must be .* each once"),
        ({"layers": [[0]]}, r"layers must be indices below 3, .* got \[0\]"),
        ({"preserve": "no"}, "preserve must be True or False, got 'no'"),
        ({"lamda_init": 1.0}, "lamda_init.*did you mean 'lambda_init'"),
        ({"perserve": False}, "perserve.*did you mean 'preserve'"),
    ],
)
def test_what_would_not_preserve_is_refused_and_changes_nothing(as_users_run, fields, name):
    model = decoder("gpt2")
    with pytest.raises((ValueError, TypeError), match=name):
        replace_attention(model, **fields)
    assert not any(isinstance(module, FreeEnergyHead) for module in model.modules())
    assert not hasattr(model.config, "free_energy_mixer")


@pytest.mark.parametrize("preserve", [True, False])
def test_a_second_replacement_of_a_layer_is_refused(preserve):
    model = replace_attention(decoder("gpt2"), preserve=preserve, layers=[1])
    with pytest.raises(ValueError, match="before"):
        replace_attention(model, layers=[1])
    replace_attention(model, layers=[0, 2])


def test_a_call_that_fails_lets_its_features_go():
    model = replace_attention(decoder("llama"))
    model.model.layers[0].self_attn.k_proj = nn.Linear(3, 3)
    with pytest.raises(RuntimeError, match="shapes"):
        model(tokens(1, 11))
    assert not RUNNING.features


@pytest.mark.parametrize("which", ["replaced", "conditioner"])
def test_rows_that_torch_splits_for_its_own_attention_are_refused(which, monkeypatch):
    if which == "replaced":
        model = replace_attention(decoder("llama"))
    else:
        model = FEMForCausalLM(small_config())
        model.set_attn_implementation("sdpa")
    names = {}
    exec(compile("def split(*_, **__): pass", f"/site/{SPLITTING}/_attention.py", "exec"), names)
    monkeypatch.setattr(F, "scaled_dot_product_attention", names["split"])
    with pytest.raises(ValueError, match="rows must not be split by torch's context_parallel"):
        model(tokens(1, 11))


def test_a_model_that_is_split_over_processes_is_not_replaced(mesh):
    model = fully_shard(decoder("llama"), mesh=mesh)
    with pytest.raises(ValueError, match="must be replaced before its weights are split over processes"):
        replace_attention(model)
