"""Fused layers: their kernels in Triton's interpreter, and which calls they read."""

from functools import partial
from pathlib import Path

import pytest
import torch
from processes import needs_triton, run_cases

from fem import FreeEnergyMixer, FreeEnergyMixerConfig, fused_layer
from fem.call import Call

CHOSEN = ("go_on", "definition or exactly", "doubt or graph or miscompiles")  # each some minutes, as the rest takes
CASES, PARTS = (Path(__file__).with_name(name) for name in ("fused_cases.py", "parts_cases.py"))


@needs_triton
def test_layers_of_softmax_and_gla_are_read_as_the_definition_says():
    run_cases(CASES, "definition and (grouped and conditioner or channel)")


@needs_triton
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("cases", "chosen"),
    [*((CASES, chosen) for chosen in CHOSEN), (CASES, f"not ({' or '.join(CHOSEN)})"), (PARTS, "test")],
)
def test_every_case_in_the_interpreter(cases, chosen):
    run_cases(cases, chosen)


def call(layer, x, **marks):
    given = {"attention_mask": None, "segment_ids": None, "state": None, "return_state": False} | marks
    return Call.open(layer, x, *given.values()).kept_first(layer.config)


@pytest.fixture
def there(monkeypatch):
    """A GPU whose attention takes every width, and flash-linear-attention."""
    monkeypatch.setattr(fused_layer, "found", lambda module: True)
    monkeypatch.setattr(fused_layer, "available", lambda x: True)
    known = fused_layer.attention_kernel
    monkeypatch.setattr(fused_layer, "attention_kernel", lambda *sizes: known(*sizes) if sizes[-1] else (False, False))


def build(dtype=torch.bfloat16, **fields):
    return FreeEnergyMixer(FreeEnergyMixerConfig(n_embd=16, n_head=2, use_conv=False, **fields)).to(dtype)


def hooked(part="value", **fields):
    layer = build(**fields)
    getattr(layer, part).register_forward_hook(lambda *inputs: None)
    return layer


def adapted(**fields):
    layer = build(**fields)
    layer.prior.query = torch.nn.Sequential(layer.prior.query)
    return layer


def biased():
    layer = build(gate_rank=4)
    layer.gate.inner.down = torch.nn.Linear(16, 4, dtype=torch.bfloat16)
    return layer


gla = partial(build, prior_type="gla")
ONES = torch.ones(2, 5)
FITS = {  # the layer, what the call says, and whether the fused form reads it
    "a plain call in bfloat16": (build, {}, True),
    "padding that causality hides": (build, {"attention_mask": ONES.bool()}, True),
    "padding in both directions": (lambda: build(causal=False), {"attention_mask": ONES.bool()}, True),
    "documents": (build, {"segment_ids": ONES.long()}, True),
    "documents and padding": (build, {"segment_ids": ONES.long(), "attention_mask": ONES.bool()}, True),
    "padding and a state under gradients": (build, {"attention_mask": ONES.bool(), "return_state": True}, False),
    "gla, padding and a state": (gla, {"attention_mask": ONES.bool(), "return_state": True}, False),
    "a state under gradients": (build, {"return_state": True}, False),
    "float32": (lambda: build(torch.float32), {}, False),
    "float16": (lambda: build(torch.float16), {}, False),
    "a hook": (hooked, {}, False),
    "a hook on the gates": (lambda: hooked("gate"), {}, False),
    "an adapter": (adapted, {}, False),
    "a bias in the first map of a slim gate": (biased, {}, False),
    "a window": (lambda: build(window=4), {}, True),
    "a window and padding": (lambda: build(window=4), {"attention_mask": ONES.bool()}, True),
    "a window of wide heads": (lambda: build(window=4, qk_dim=288), {}, False),
    "another backend": (lambda: build(backend="plain"), {}, False),
    "a gate per head": (lambda: build(gate_rank=0), {}, False),
    "a cap": (lambda: build(value_logexp_cap=5.0), {}, False),
    "gla": (gla, {}, True),
    "gla, padding": (gla, {"attention_mask": ONES.bool()}, True),
    "gla, documents": (gla, {"segment_ids": ONES.long()}, True),
    "gla, a state under gradients": (gla, {"return_state": True}, False),
    "gla, a hook": (lambda: hooked(prior_type="gla"), {}, False),
    "gla, an adapter": (lambda: adapted(prior_type="gla"), {}, False),
    "gla, a decay for each key channel": (lambda: build(prior_type="gla", decay="channel"), {}, True),
    "gla, no normalisation": (lambda: build(prior_type="gla", normalize=False), {}, False),
    "linear, both directions": (lambda: build(prior_type="linear", causal=False), {}, False),
    "another prior": (lambda: build(prior_type="rnn_softmax"), {}, False),
}


@pytest.mark.parametrize("case", FITS)
def test_only_what_the_fused_form_computes_fits(there, case):
    make, marks, fits = FITS[case]
    layer = make()
    if layer.config.prior_type in ("linear", "gla"):
        pytest.importorskip("triton")
    opened = call(layer, torch.randn(2, 5, 16).to(layer.value.weight.dtype), **marks)
    assert fused_layer.fits(layer, opened) is fits
    if "return_state" in marks:
        with torch.no_grad():
            assert fused_layer.fits(layer, opened)


def test_a_cpu_takes_the_plain_way():
    layer = build()
    assert not fused_layer.fits(layer, call(layer, torch.randn(2, 5, 16).bfloat16()))
