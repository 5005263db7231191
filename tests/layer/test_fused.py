"""The fused softmax layer: its kernels in Triton's interpreter, and which calls it reads."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from fem import FreeEnergyMixer, FreeEnergyMixerConfig, fused_layer
from fem.call import Call

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")


def run_cases(chosen: str) -> None:
    """The cases whose names fit, in a process in which Triton interprets its kernels."""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    cases = str(Path(__file__).with_name("fused_cases.py"))
    options = ["-q", "-x", "-o", "addopts=", "-p", "no:cacheprovider", "-k"]
    command = [sys.executable, "-m", "pytest", *options, chosen, cases]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]


@needs_triton
def test_a_full_layer_reads_as_the_definition_does():
    run_cases("definition and full and not split")


@needs_triton
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_case_in_the_interpreter():
    run_cases("test")


def call(layer, x, **marks):
    given = {"attention_mask": None, "segment_ids": None, "state": None, "return_state": False} | marks
    return Call.open(layer, x, *given.values())


@pytest.fixture
def there(monkeypatch):
    """A GPU whose attention takes every width."""
    monkeypatch.setattr(fused_layer, "available", lambda x: True)
    monkeypatch.setattr(fused_layer, "_kernel", lambda *sizes: "cudnn")


def build(dtype=torch.bfloat16, **fields):
    return FreeEnergyMixer(FreeEnergyMixerConfig(n_embd=16, n_head=2, use_conv=False, **fields)).to(dtype)


def hooked():
    layer = build()
    layer.value.register_forward_hook(lambda *inputs: None)
    return layer


def adapted():
    layer = build()
    layer.prior.query = torch.nn.Sequential(layer.prior.query)
    return layer


ONES = torch.ones(2, 5)
FITS = {  # the layer, what the call says, and whether the fused form reads it
    "a plain call in bfloat16": (build, {}, True),
    "padding that causality hides": (build, {"attention_mask": ONES.bool()}, True),
    "padding in both directions": (lambda: build(causal=False), {"attention_mask": ONES.bool()}, False),
    "documents": (build, {"segment_ids": ONES.long()}, False),
    "a state under gradients": (build, {"return_state": True}, False),
    "float32": (lambda: build(torch.float32), {}, False),
    "float16": (lambda: build(torch.float16), {}, False),
    "a hook": (hooked, {}, False),
    "an adapter": (adapted, {}, False),
    "a window": (lambda: build(window=4), {}, False),
    "another backend": (lambda: build(backend="plain"), {}, False),
    "a gate per head": (lambda: build(gate_rank=0), {}, False),
    "a cap": (lambda: build(value_logexp_cap=5.0), {}, False),
    "another prior": (lambda: build(prior_type="gla"), {}, False),
}


@pytest.mark.parametrize("case", FITS)
def test_only_what_the_fused_form_computes_fits(there, case):
    make, marks, fits = FITS[case]
    layer = make()
    opened = call(layer, torch.randn(2, 5, 16).to(layer.value.weight.dtype), **marks)
    assert fused_layer.fits(layer, opened) is fits
    if "return_state" in marks:
        with torch.no_grad():
            assert fused_layer.fits(layer, opened)


def test_a_cpu_takes_the_plain_way():
    layer = build()
    assert not fused_layer.fits(layer, call(layer, torch.randn(2, 5, 16).bfloat16()))
