"""`torch.export` and ONNX: the same function at any length, of torch's own operations where it is to leave torch."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from originals import bert, decoder
from small_models import left_padded, lively, small_config, tokens
from torch import nn
from torch.export import Dim, export

from fem import (
    PRIORS,
    FreeEnergyCrossMixer,
    FreeEnergyMixer,
    FreeEnergyMixerConfig,
    FreeEnergyPooling,
    replace_attention,
)
from fem.functional import softmax_read
from fem.models import FEMForCausalLM, FEMForImageClassification, FEMImageConfig

pytestmark = pytest.mark.usefixtures("as_users_run")  # shapes of an export are symbols
ANY = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}
IMAGE = {"image_size": 8, "patch_size": 4, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
close = partial(torch.testing.assert_close, rtol=1e-4, atol=2e-5)
QUICK = "rnn_decay"  # an exported step is slow to trace
EVERY_PRIOR = [prior if prior == QUICK else pytest.param(prior, marks=pytest.mark.slow) for prior in PRIORS]


@pytest.fixture(autouse=True)
def nothing_was_exported_before():
    """An earlier export of a scan leaves sizes behind that were constants there (docs/limits.md)."""
    torch._dynamo.reset()


def exported(layer: nn.Module, *inputs: torch.Tensor, sizes: dict = ANY):
    return export(layer, inputs, dynamic_shapes=tuple(sizes for _ in inputs), strict=False)


@pytest.mark.parametrize("prior", EVERY_PRIOR)
def test_a_layer_exported_for_inference_is_torchs_own_operations_at_any_length(prior):
    config = FreeEnergyMixerConfig(n_embd=16, n_head=2, prior_type=prior, use_conv=prior == "softmax")
    layer = lively(FreeEnergyMixer(config))
    with torch.no_grad():
        program = exported(layer, torch.randn(2, 7, 16))
    graphs = [module.graph for module in program.graph_module.modules() if hasattr(module, "graph")]
    assert not [node for graph in graphs for node in graph.nodes if str(node.target).startswith("fem")]
    for rows, time in ((1, 2), (3, 7), (2, 33)):
        x = torch.randn(rows, time, 16)
        close(program.module()(x), layer(x))


@pytest.mark.parametrize(
    "prior", [prior if prior == "softmax" else pytest.param(prior, marks=pytest.mark.slow) for prior in PRIORS]
)
def test_a_layer_exported_with_gradients_has_those_of_the_layer(prior):
    layer = lively(FreeEnergyMixer(FreeEnergyMixerConfig(n_embd=16, n_head=2, prior_type=prior)))
    program = exported(layer, torch.randn(2, 7, 16)).module()
    x = torch.randn(3, 12, 16)
    found = torch.autograd.grad(program(x).square().mean(), tuple(program.parameters()))
    expected = torch.autograd.grad(layer(x).square().mean(), tuple(layer.parameters()))
    rounding = 1e-6 * max(float(b.abs().max()) for b in expected)  # a bias of log-weights has no gradient but this
    for (name, _), a, b in zip(layer.named_parameters(), found, expected, strict=True):
        within = {"rtol": 1e-3, "atol": 1e-3 * float(b.abs().max()) + rounding}
        torch.testing.assert_close(a, b, **within, msg=lambda m, n=name: f"{n}: {m}")


def test_a_scan_is_exported_again_with_other_sizes_after_a_reset():
    config = FreeEnergyMixerConfig(n_embd=16, n_head=2, prior_type=QUICK, use_conv=False)
    layer, x = lively(FreeEnergyMixer(config)), torch.randn(2, 7, 16)
    with torch.no_grad():
        exported(layer, x, sizes={})
        torch._dynamo.reset()
        program = exported(layer, x).module()
    x = torch.randn(3, 9, 16)
    close(program(x), layer(x))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prior", "sizes"), [("softmax", ANY), (QUICK, {1: Dim.DYNAMIC}), ("mamba_interactive", {1: Dim.DYNAMIC})]
)
def test_inductor_compiles_what_was_exported_ahead_of_time(prior, sizes, tmp_path):
    layer = lively(FreeEnergyMixer(FreeEnergyMixerConfig(n_embd=16, n_head=2, prior_type=prior, use_conv=False)))
    with torch.no_grad():
        program = exported(layer, torch.randn(2, 7, 16), sizes=sizes)
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "layer.pt2"))
    for rows, time in ((2, 3), (5 if 0 in sizes else 2, 40)):
        x = torch.randn(rows, time, 16)
        close(torch._inductor.aoti_load_package(path)(x), layer(x))


@pytest.mark.slow
@torch.no_grad()
def test_documents_in_both_directions_are_exported():
    """Without biases, some of the sequences of the conditioner's two scans are views and others are not."""
    both_ways = {"causal": False, "conv_bidirectional": True, "bias": False}
    layer = lively(FreeEnergyMixer(FreeEnergyMixerConfig(n_embd=16, n_head=2, prior_type="linear", **both_ways)))
    documents = lambda rows, time: torch.randint(0, 3, (rows, time)).sort(1).values  # noqa: E731
    x, mask, ids = torch.randn(2, 5, 16), None, documents(2, 5)
    program = export(layer, (x, mask, ids), dynamic_shapes=(ANY, None, ANY), strict=False).module()
    for rows, time in ((1, 3), (3, 9)):
        x, ids = torch.randn(rows, time, 16), documents(rows, time)
        close(program(x, None, ids), layer(x, segment_ids=ids))


class Logits(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, pixels):
        return (self.model(pixels).logits,)


class Read(nn.Module):
    def __init__(self, **how):
        super().__init__()
        self.how = how

    def forward(self, q, k, v, keep):
        read = softmax_read(q, k, v, torch.full(v.shape[2:], 3.0), key_mask=keep, **self.how)
        return read.mean, read.free_energy


@torch.no_grad()
def test_an_exported_read_counts_no_value_as_more_than_58_nats_below_the_largest_of_its_row():
    """To log 2, by which a shift may stand above the largest."""
    q, k, v = (torch.randn(2, 9, 2, 4) for _ in range(3))
    keep = torch.ones(2, 9, dtype=torch.bool)
    keep[0, :3], v[0, 1] = False, 500.0
    program = exported(Read(), q, k, v, keep).module()
    for spike, within in ((15.0, 1e-5), (300.0, 0.7 / 3)):
        v[:, 6] = spike
        mean, free_energy = program(q, k, v, keep)
        close(mean, Read()(q, k, v, keep)[0])
        expected = Read()(q, k, v.clamp_min(spike - 58 / 3), keep)[1]
        torch.testing.assert_close(free_energy, expected, rtol=1e-6, atol=within)


@pytest.mark.parametrize(
    "kind", ["cross", "query", "image", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("window", "pooling"))]
)
def test_reads_with_masks_are_exported_for_any_batch_and_length(kind):
    draw = {
        "window": lambda rows, time: (*(torch.randn(rows, time, 2, 4) for _ in range(3)), torch.rand(rows, time) > 0.3),
        "pooling": lambda rows, time: (torch.randn(rows, time, 16), torch.rand(rows, time) > 0.3),
        "query": lambda rows, time: (torch.randn(rows, time, 16), torch.rand(rows, time) > 0.3),
        "cross": lambda rows, time: (torch.randn(rows, time + 1, 16), torch.randn(rows, time, 16)),
        "image": lambda rows, time: (torch.randn(rows, 3, 8, 8),),
    }[kind]
    layer = {"window": Read(window=3), "pooling": FreeEnergyPooling(16, 2, 3), "cross": FreeEnergyCrossMixer(16, 2)}
    layer |= {
        "query": FreeEnergyPooling(16, 2),
        "image": Logits(FEMForImageClassification(FEMImageConfig(**IMAGE)).eval()),
    }
    with torch.no_grad():
        program = exported(layer[kind], *draw(2, 7), sizes={0: Dim.DYNAMIC} if kind == "image" else ANY).module()
        for rows, time in ((1, 4), (3, 9)):
            inputs = draw(rows, time)
            close(program(*inputs), layer[kind](*inputs))


def in_onnx(model: nn.Module, path, **inputs: torch.Tensor):
    """The model as onnxruntime runs it, at any batch and length."""
    for package in ("onnx", "onnxscript"):
        pytest.importorskip(package, reason="needs the extra 'onnx'")
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs the extra 'onnx'")
    fixed = {"use_cache": False} if "input_ids" in inputs else {}
    shapes = dict.fromkeys(inputs, ANY) | dict.fromkeys(fixed)
    with torch.no_grad():
        options = {"dynamo": True, "verbose": False, "dynamic_shapes": shapes}
        torch.onnx.export(model, (), path, kwargs=inputs | fixed, **options)
    session = onnxruntime.InferenceSession(path)
    return lambda **given: torch.tensor(session.run(None, {name: x.numpy() for name, x in given.items()})[0])


def marked(rows: int, time: int) -> dict[str, torch.Tensor]:
    """Tokens, the first half of the first row padded."""
    lengths = time - time // 2, *[time] * (rows - 1)
    return {"input_ids": tokens(rows, time), "attention_mask": left_padded(time, *lengths)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prior", "mixer"), [("softmax", {}), ("softmax", {"window": 4}), ("gla", {}), ("rnn_softmax", {}), ("mamba", {})]
)
def test_onnxruntime_finds_the_logits_at_any_batch_and_length(prior, mixer, tmp_path):
    mixer = {"use_conv": prior == "rnn_softmax"} | mixer
    model = lively(FEMForCausalLM(small_config(prior_type=prior, num_hidden_layers=1, mixer=mixer)))
    run = in_onnx(model, tmp_path / "m.onnx", **marked(2, 9))
    for rows, time in ((1, 2), (2, 9), (5, 21)):
        given = marked(rows, time)
        torch.testing.assert_close(run(**given), model(**given, use_cache=False).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_the_export_of_the_faq_takes_any_batch_and_length(tmp_path, monkeypatch):
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs the extra 'onnx'")
    monkeypatch.chdir(tmp_path)
    torch._dynamo.reset()  # docs/limits.md: of what other tests exported
    model = lively(FEMForCausalLM(small_config(prior_type=QUICK, num_hidden_layers=1)))
    names = {"torch": torch, "model": model, "ids": tokens(2, 9), "mask": torch.ones(2, 9, dtype=torch.long)}
    page = (Path(__file__).parents[2] / "docs/faq.md").read_text()
    exec(page.split("How do I export it?")[1].split("```python")[1].split("```")[0], names)
    given = {"input_ids": tokens(3, 14), "attention_mask": torch.ones(3, 14, dtype=torch.long)}
    expected = model(**given, use_cache=False).logits
    close(names["program"].module()(**given, use_cache=False).logits, expected)
    session = onnxruntime.InferenceSession("model.onnx")
    close(torch.tensor(session.run(None, {name: x.numpy() for name, x in given.items()})[0]), expected)


def test_a_model_under_an_engines_attention_is_exported_for_any_batch_and_length():
    model = lively(FEMForCausalLM(small_config(num_hidden_layers=1, mixer={"use_conv": False})))
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        how = {"dynamic_shapes": {"input_ids": ANY, "use_cache": None}, "strict": False}
        program = export(model, (), {"input_ids": tokens(2, 7), "use_cache": False}, **how).module()
        close(program(input_ids=tokens(3, 12), use_cache=False).logits, model(tokens(3, 12)).logits)


@pytest.mark.slow
def test_onnxruntime_finds_what_is_read_both_ways(tmp_path):
    config = FreeEnergyMixerConfig(n_embd=16, n_head=2, causal=False, window=3, use_conv=False)
    layer = lively(FreeEnergyMixer(config)).eval()
    mask = torch.ones(2, 9, dtype=torch.bool)
    run = in_onnx(layer, tmp_path / "m.onnx", x=torch.randn(2, 9, 16), attention_mask=mask)
    for rows, time in ((1, 4), (3, 14)):
        x, mask = torch.randn(rows, time, 16), torch.ones(rows, time, dtype=torch.bool)
        mask[0, 1] = False
        torch.testing.assert_close(run(x=x, attention_mask=mask), layer(x, mask), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_a_converted_model_exports_as_it_did_before(kind, tmp_path):
    model = replace_attention(bert().bert if kind == "bert" else decoder(kind), lambda_init=-1.0)
    given = {"input_ids": tokens(2, 9), "attention_mask": torch.ones(2, 9, dtype=torch.long)}
    run = in_onnx(model, tmp_path / "m.onnx", **given)
    for rows, time in ((1, 3), (4, 12)):
        given = {"input_ids": tokens(rows, time), "attention_mask": torch.ones(rows, time, dtype=torch.long)}
        torch.testing.assert_close(run(**given), model(**given, use_cache=False)[0], rtol=1e-4, atol=1e-4)
