"""Softmax reads whose maps are somebody else's, in Triton's interpreter: `test_fused.py` runs this file."""

from copy import deepcopy
from functools import partial
from itertools import product

import fused_on_cpu
import pytest
import torch
from dispatched import watched
from fused_cases import (
    LAYERS,
    VALUES,
    assert_masked_tokens_are_passed_over,
    assert_near,
    build,
    errors,
    hooked,
    spread,
    trained,
)
from layers import stirred

from fem import FreeEnergyMixerConfig, fused_layer
from fem.models import FEMConfig, FEMForCausalLM, replace_attention
from fem.models.modeling import LORA
from fem.models.surgery import head
from fem.models.surgery.head import FreeEnergyHead
from fem.ops.softmax.fused import bounded_attention, fused_attention, gated_read

torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)  # fresh memory is NaN: what nobody wrote shows


@pytest.fixture(autouse=True)
def fused(monkeypatch):
    fused_on_cpu.install(monkeypatch)


@pytest.mark.parametrize("name", ["slim, grouped, conditioner", "split", "a window", "a window in both directions"])
def test_values_too_wide_for_one_call_of_attention_are_read_by_two(name, monkeypatch):
    monkeypatch.setattr(fused_layer, "attention_kernel", lambda *sizes: (False, True))
    layer, pieces, together = build(LAYERS[name]), [], fused_attention.together
    for module in (fused_attention, bounded_attention):
        monkeypatch.setattr(module, "together", lambda given: pieces.append(len(given)) or together(given))
    found = errors(layer, torch.randn(2, 19, 20))
    assert max(found.values()) < 2e-5, found
    assert pieces == [2, 2]


@pytest.mark.parametrize("name, values", [
    *((name, "usual") for name in ("slim", "attention", "attention and the outer gate", "no outer gate")),
    *product(("a window", "slim, grouped, conditioner"), ("usual", "spikes of 300 nats")),
])  # fmt: skip
def test_what_maps_of_somebody_else_make_is_read_exactly(name, values, monkeypatch):
    layer = build(LAYERS[name])
    spread(layer, *VALUES[values])
    hooked(layer)
    monkeypatch.setattr(layer.prior, "read", None)
    x, compiled = torch.randn(2, 19, 20), torch.compile(layer, backend="aot_eager", fullgraph=True)
    found = errors(layer, x)
    assert max(found.values()) < 5e-5, found
    torch.testing.assert_close(*(trained(one, x, torch.ones_like(x)) for one in (compiled, layer)))


@pytest.mark.parametrize("name", ["a window", "both directions", "both directions, conditioner"])
def test_masked_tokens_are_passed_over_behind_maps_of_somebody_else(name, monkeypatch):
    layer = build(LAYERS[name])
    hooked(layer)
    assert_masked_tokens_are_passed_over(layer, monkeypatch)


def pairs(kind: str) -> torch.Tensor:
    """A mask of pairs of two rows of 19 tokens."""
    token, document = torch.arange(19), torch.tensor([[0] * 5 + [1] * 14, [0] * 12 + [1] * 7])[:, None]
    sees = (token <= token[:, None]).expand(2, 1, -1, -1)
    if kind == "padded on the left":
        return sees & (document == 1)[..., None, :]
    if kind == "padded on the right, added":
        return torch.zeros(2, 1, 19, 19).masked_fill(~(sees & (document == 0)[..., None, :]), torch.finfo().min)
    if kind in ("keys that are masked", "masked keys under causality"):  # from all queries
        return (document == 0)[:, :, None]
    if kind == "documents under a window":
        return sees & (document[..., None] == document[..., None, :]) & (token > token[:, None] - 4)
    return sees & (token != 3)  # a hole


@pytest.mark.parametrize("kind", [None, "padded on the left", "padded on the right, added", "keys that are masked",
                                  "masked keys under causality", "documents under a window", "a hole"])  # fmt: skip
def test_a_replaced_attention_is_read_exactly(kind, monkeypatch):
    """By the fused kernels where each query sees a range of keys, compiled too."""
    torch.manual_seed(0)
    layer = stirred(FreeEnergyHead(FreeEnergyMixerConfig(n_embd=24, n_head=2, fem_dim=24, use_conv=False)))
    twin, x, gradient = deepcopy(layer).double(), torch.randn(2, 19, 24), torch.randn(2, 19, 2, 12)
    mask, by_heads = None if kind is None else pairs(kind), lambda x: (x * torch.arange(1, 25)).unflatten(-1, (2, 12))
    how = None, kind in (None, "masked keys under causality"), 0.1, mask
    call = lambda layer, x: layer(x, *(by_heads(y) for y in (x.sin(), x.cos(), x)), *how)  # noqa: E731
    wanted = trained(partial(call, twin), x.double(), gradient, twin.parameters())
    reads, read = [], head.softmax_read
    monkeypatch.setattr(head, "softmax_read", lambda *given, **options: reads.append(1) or read(*given, **options))
    eager = partial(call, layer)
    for one in (eager, torch.compile(eager, backend="aot_eager", fullgraph=True)):
        assert_near(trained(one, x, gradient, layer.parameters()), wanted, 2e-5, gradient)
    assert len(reads) == (kind == "a hole")


@torch.no_grad()
@pytest.mark.parametrize("kind", ["padded on the left", "documents under a window", "a hole"])
def test_the_last_queries_of_a_cache_are_read_exactly(kind, monkeypatch):
    layer = stirred(FreeEnergyHead(FreeEnergyMixerConfig(n_embd=24, n_head=2, fem_dim=24, use_conv=False)))
    x, mask = torch.randn(2, 19, 24), pairs(kind)
    q, k, v = (y.unflatten(-1, (2, 12)) for y in (x.sin(), x.cos(), 9 * x))
    wanted = deepcopy(layer).double()(*(y.double() for y in (x, q, k, v)), None, False, None, mask)[:, -7:]
    reads = watched(monkeypatch, head, "softmax_read")
    found = layer(x[:, -7:], q[:, -7:], k, v, None, False, None, mask[:, :, -7:])
    assert (found - wanted).norm() < 1e-5 * wanted.norm()
    assert len(reads) == (kind == "a hole")


LLAMA = {"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


@pytest.mark.parametrize("replaced", [False, True])
def test_a_model_with_lora_is_read_as_by_other_forms(replaced, monkeypatch):
    """Its loss and gradients, of beta and lambda too, which peft keeps beside the original's."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    if replaced:
        model = replace_attention(transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)))
    else:
        model = FEMForCausalLM(FEMConfig(**LLAMA))
    targets = {"target_modules": ["q_proj", "v_proj"]} if replaced else {}
    model = peft.get_peft_model(model, peft.LoraConfig(**LORA | targets))
    learnt = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with torch.no_grad():
        for parameter in learnt:
            parameter.add_(0.1 * torch.randn_like(parameter))
    ids, reads = torch.randint(32, (2, 19)), watched(monkeypatch, gated_read, "gated_read")

    def step():
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        return loss, *torch.autograd.grad(loss, learnt)

    found = step()
    assert len(reads) == 2
    monkeypatch.setattr(fused_layer, "available", lambda x: False)
    for one, other in zip(found, step(), strict=True):
        assert (one - other).norm() <= 1e-4 * other.norm() + 1e-6
