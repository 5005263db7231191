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
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-o",
        "addopts=",
        "-p",
        "no:cacheprovider",
        "-k",
        chosen,
        cases,
    ]
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


def test_a_plain_call_in_bfloat16_fits(there):
    layer = build()
    assert fused_layer.fits(layer, call(layer, torch.randn(2, 5, 16).bfloat16()))


@pytest.mark.parametrize(
    "fields", [{"window": 4}, {"backend": "plain"}, {"gate_rank": 0}, {"value_logexp_cap": 5.0}, {"prior_type": "gla"}]
)
def test_layers_of_other_forms_do_not_fit(there, fields):
    layer = build(**fields)
    assert not fused_layer.fits(layer, call(layer, torch.randn(2, 5, 16).bfloat16()))


@pytest.mark.parametrize(
    "marks",
    [
        {"segment_ids": torch.zeros(2, 5, dtype=torch.long)},
    ],
)
def test_documents_do_not_fit(there, marks):
    layer = build()
    assert not fused_layer.fits(layer, call(layer, torch.randn(2, 5, 16).bfloat16(), **marks))


def test_a_state_is_returned_where_no_gradient_is_wanted(there):
    layer, x = build(), torch.randn(2, 5, 16).bfloat16()
    assert not fused_layer.fits(layer, call(layer, x, return_state=True))
    with torch.no_grad():
        assert fused_layer.fits(layer, call(layer, x, return_state=True))


@pytest.mark.parametrize("causal", [True, False])
def test_padding_fits_where_causality_hides_it(there, causal):
    layer = build(causal=causal)
    marks = {"attention_mask": torch.ones(2, 5, dtype=torch.bool)}
    assert fused_layer.fits(layer, call(layer, torch.randn(2, 5, 16).bfloat16(), **marks)) is causal


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_do_not_fit(there, dtype):
    layer = build(dtype)
    assert not fused_layer.fits(layer, call(layer, torch.randn(2, 5, 16, dtype=dtype)))


def test_a_hook_or_an_adapter_takes_the_plain_way(there):
    layer, x = build(), torch.randn(2, 5, 16).bfloat16()
    layer.value.register_forward_hook(lambda *inputs: None)
    assert not fused_layer.fits(layer, call(layer, x))
    layer = build()
    layer.prior.query = torch.nn.Linear(16, layer.config.qk_dim).bfloat16()
    assert not fused_layer.fits(layer, call(layer, x))


def test_a_cpu_takes_the_plain_way():
    layer = build()
    assert not fused_layer.fits(layer, call(layer, torch.randn(2, 5, 16).bfloat16()))
