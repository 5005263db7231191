"""Layers with states inside vLLM, by a stand-in for what vLLM hands a model: slots, and which tokens are whose.

`make test-vllm` asks vLLM itself.
"""

import random
import sys
from importlib import import_module
from types import ModuleType, SimpleNamespace

import pytest
import torch
from dispatched import watched
from own_priors import register
from small_models import lively
from torch import nn

from fem.models import FEMConfig, FEMForCausalLM
from fem.models.engines.obstacles import obstacle_to_states

SIZES = {"vocab_size": 17, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
SLOTS, BLOCK = 7, 4
HYBRID = {"layer_priors": [{"prior_type": "gla", "use_conv": True}, {"prior_type": "softmax", "use_conv": False}]}
MODELS = {
    "linear": {"prior_type": "linear", "mixer": {"use_conv": False}},
    "gla and the conditioner": {"prior_type": "gla"},
    "mamba": {"prior_type": "mamba", "mixer": {"use_conv": False}},
    "softmax and the conditioner": {},
    "split softmax and the conditioner": {"mixer": {"free_share": 0.5}},
    "split gla": {"prior_type": "gla", "mixer": {"free_share": 0.5, "use_conv": False}},
    "hybrid": HYBRID,
}


class Paged(nn.Module):
    """vLLM's attention: keys and values of every request, and softmax over those that a token sees."""

    def __init__(self, heads, width, scale, num_kv_heads, cache_config, per_layer_sliding_window, prefix):
        super().__init__()
        self.shape, self.scale, self.kept = (heads, width), scale, {}

    def forward(self, q, k, values):
        out = torch.zeros_like(q)
        metadata = now.attn_metadata["attention"]
        for request, (first, last) in enumerate(zip(metadata.starts, metadata.starts[1:])):
            new = torch.stack([k[first:last], values[first:last]])
            slot = metadata.slots[request]
            seen = metadata.seq_lens[request] - (last - first)
            whole = torch.cat([self.kept[slot], new], 1) if seen else new
            self.kept[slot] = whole
            q_, k_, v_ = (x.unflatten(-1, self.shape).transpose(0, 1) for x in (q[first:last], *whole))
            mask = torch.ones(last - first, whole.shape[1], dtype=torch.bool).tril(int(seen))
            read = nn.functional.scaled_dot_product_attention(q_, k_, v_, mask, scale=self.scale)
            out[first:last] = read.transpose(0, 1).flatten(1)
        return out


now = SimpleNamespace(attn_metadata=None)
compilation = SimpleNamespace(static_forward_context={})
STAND_INS = {
    "vllm.config": {
        "VllmConfig": object,
        "get_current_vllm_config": lambda: SimpleNamespace(compilation_config=compilation),
    },
    "vllm.forward_context": {"get_forward_context": lambda: now},
    "vllm.model_executor.layers.attention": {"Attention": Paged},
    "vllm.model_executor.layers.mamba.abstract": {"MambaBase": type("MambaBase", (), {})},
    "vllm.model_executor.layers.mamba.mamba_utils": {"get_temporal_copy_spec": None},
    "vllm.model_executor.models.interfaces": {"HasInnerState": type("A", (), {}), "IsHybrid": type("B", (), {})},
    "vllm.v1.attention.backend": {"AttentionCGSupport": SimpleNamespace(NEVER="never")},
    "vllm.v1.attention.backends.linear_attn": {
        name: type(name, (), {}) for name in ("LinearAttentionBackend", "LinearAttentionMetadataBuilder")
    },
    "vllm.v1.attention.backends.registry": {"MambaAttentionBackendEnum": SimpleNamespace(LINEAR="linear")},
}


@pytest.fixture(scope="module")
def states():
    with pytest.MonkeyPatch.context() as patch:
        for name, contents in STAND_INS.items():
            module = ModuleType(name)
            vars(module).update(contents)
            patch.setitem(sys.modules, name, module)
        patch.delitem(sys.modules, "fem.models.engines.vllm_states", raising=False)
        yield import_module("fem.models.engines.vllm_states")
        sys.modules.pop("fem.models.engines.vllm_states")


def drawn(fields):
    return lively(FEMForCausalLM(FEMConfig(**SIZES, **fields)), size=0.2)


def inside_vllm(states, model, ranks=1, cache_dtype="auto", drafts=None):
    config = FEMConfig(**model.config.to_dict())
    vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(hf_config=config, dtype=torch.float32),
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
        cache_config=SimpleNamespace(cache_dtype=cache_dtype),
        speculative_config=drafts,
    )
    inside = states.FEMStatesForCausalLM(vllm_config=vllm_config).eval()
    inside.load_weights(model.state_dict().items())
    for block in inside.fem.model.layers:
        if hasattr(block.mixer, "row"):
            shapes = zip(block.mixer.get_state_shape(), block.mixer.get_state_dtype())
            block.mixer.kv_cache = tuple(torch.full((SLOTS, *shape), torch.nan, dtype=kind) for shape, kind in shapes)
    return inside


def a_step(inside, work, padding):
    """Logits of the work: (tokens, how many came before, slot) of every request; some padding behind."""
    lengths = torch.tensor([len(tokens) for tokens, _, _ in work])
    starts = torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0).int()])
    before, slots = (torch.tensor([part[i] for part in work], dtype=torch.int32) for i in (1, 2))
    kept = {"query_start_loc": starts, "seq_lens": before + lengths.int(), "state_indices_tensor": slots}
    metadata = SimpleNamespace(**kept, starts=starts.tolist(), slots=slots.tolist())
    now.attn_metadata = dict.fromkeys(["attention", *compilation.static_forward_context], metadata)
    ids = torch.cat([torch.tensor(tokens) for tokens, _, _ in work] + [torch.zeros(padding, dtype=torch.long)])
    position = torch.cat([b + torch.arange(n) for b, n in zip(before, lengths)] + [torch.zeros(padding)]).long()
    logits = inside.compute_logits(inside(ids, position))
    assert len(logits) == len(ids)
    return logits[: len(ids) - padding].split(lengths.tolist())


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_requests_that_join_and_end_read_as_whole_rows(states, name):
    """Prompts in chunks, single tokens and new requests in one step; a slot that is used again holds nothing."""
    model, draw = drawn(MODELS[name]), random.Random(1)
    inside = inside_vllm(states, model)
    rows = [torch.randint(0, 17, (n,)).tolist() for n in (1, 9, 2, 13, 5, 8, 3, 11)]
    waiting, running, found = list(range(len(rows))), {}, [[] for _ in rows]  # running: the slot of each row
    while waiting or running:
        while waiting and len(running) < 3:
            running[waiting.pop(0)] = draw.choice(sorted(set(range(SLOTS)) - set(running.values())))
        take = {row: draw.choice((1, 1, BLOCK)) for row in running}
        work = {row: (rows[row][len(found[row]) :][: take[row]], len(found[row]), running[row]) for row in running}
        order = sorted(work, key=lambda row: len(work[row][0]) > 1)  # single tokens first, as vLLM orders them
        for row, logits in zip(order, a_step(inside, [work[row] for row in order], padding=draw.choice((0, 3)))):
            found[row] += [*logits]
        running = {row: slot for row, slot in running.items() if len(found[row]) < len(rows[row])}
    for row, logits in zip(rows, found):
        torch.testing.assert_close(torch.stack(logits), model(torch.tensor([row])).logits[0], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_which_tokens_are_whose_is_read_on_the_host_once_for_all_layers(states, monkeypatch):
    inside = inside_vllm(states, drawn(MODELS["gla and the conditioner"]))
    asked = watched(monkeypatch, states, "rows_of")
    a_step(inside, [([3, 1, 4], 0, 2), ([1, 5], 0, 5)], padding=1)
    a_step(inside, [([9], 3, 2), ([2], 2, 5), ([6, 5], 0, 1)], padding=0)
    assert len(asked) == 2
    two, one = inside.fem.model.layers[0].mixer.rows
    assert (two.tokens.tolist(), two.requests.tolist(), two.new) == ([[0], [1]], [0, 1], False)
    assert (one.tokens.tolist(), one.requests.tolist(), one.new) == ([[2, 3]], [2], True)


REFUSED = [  # fields of a model, options of vLLM, and what is said
    ({"mixer": {"use_conv": False}}, {}, "no layer has a state"),
    ({"layer_priors": ["gla", "rnn_decay"]}, {}, "layer 1 has another state"),
    ({"layer_priors": ["gla", "mean_alone"]}, {}, "layer 1 keeps keys and values, and its prior 'mean_alone' reads"),
    ({"layer_priors": ["gla", {"prior_type": "softmax", "n_kv_head": 2}]}, {}, "layer 1 has 2 key heads"),
    (MODELS["linear"], {"ranks": 2}, "tensor_parallel_size must be 1"),
    (MODELS["linear"], {"drafts": object()}, "speculative_config must be left out"),
    (HYBRID, {"cache_dtype": "fp8"}, "kv_cache_dtype must be 'auto' or 'bfloat16' .* got 'fp8'"),
]


@pytest.mark.parametrize("fields, options, said", REFUSED, ids=[said for *_, said in REFUSED])
def test_what_slots_cannot_hold_and_what_states_cannot_follow_is_refused(states, monkeypatch, fields, options, said):
    register(monkeypatch)
    config = FEMConfig(**SIZES, **fields)
    if not options:
        assert obstacle_to_states(config).startswith(said)
    with pytest.raises(ValueError, match=said):
        inside_vllm(states, FEMForCausalLM(config), **options)


def test_no_cuda_graph_holds_what_the_host_decides(states):
    mixer = inside_vllm(states, drawn(MODELS["linear"])).fem.model.layers[0].mixer
    assert mixer.get_attn_backend().get_builder_cls()._cudagraph_support == "never"


def test_a_checkpoint_of_another_model_is_refused(states):
    model = drawn(MODELS["linear"])
    weights = {"other" if n == "model.norm.weight" else n: w for n, w in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"without .'model.norm.weight'. and with .'other'."):
        inside_vllm(states, model).load_weights(weights.items())


def test_layers_are_named_in_vllms_words():
    assert FEMConfig(**SIZES, **HYBRID).layers_block_type == ["mamba", "attention"]
