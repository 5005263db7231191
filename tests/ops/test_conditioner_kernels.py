"""The conditioner's kernels in Triton's interpreter, against the definition: one case for every promise."""

import functools
import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from naive_conditioner import naive_conditioner
from processes import printed
from torch import nn

from fem.config import CONDITIONERS
from fem.ops.common.tokens import Tokens
from fem.ops.conditioner.fused_conditioner import fits
from fem.ops.conditioner.plain_conditioner import ConvForm, plain_condition

SUPPORT = Path(__file__).parents[1] / "support"
# batch, time, width, and what else is said of a case
FAST = {
    "a row": (1, 37, 8, {}),
    "documents and padding in two chunks": (2, 71, 5, {"documents": True, "padding": True}),
    "without a state before": (1, 37, 8, {"hidden": False}),
    "one token": (2, 1, 16, {}),
    "a shut gate": (1, 37, 8, {"a": -20.0}),
    "the paper's form": (1, 37, 8, {"form": "paper"}),
}
SLOW = {
    "documents": (2, 37, 8, {"documents": True}),
    "padding": (2, 37, 8, {"padding": True}),
    "the gradient of h alone": (1, 37, 8, {"grads": ["h"]}),
    "the gradient of the last state alone": (1, 37, 8, {"grads": ["last"]}),
    "no memory": (1, 37, 8, {"f": 14.0}),
    "the authors' form": (1, 37, 8, {"form": "authors"}),
    "a prime number of tokens in three chunks": (1, 131, 24, {"documents": True}),
    "chunks of many tiles": (2, 67, 5, {"NUMBERS": 64, "MOST": 2, "padding": True}),
    "more chunks than are added up at a time": (2, 97, 5, {"NUMBERS": 64, "documents": True}),
    "a long memory": (1, 131, 5, {"f": -12.0}),
    "a gate shut beyond the least length": (1, 37, 8, {"a": -30.0}),
    "a wide gate": (1, 37, 8, {"a": 30.0}),
    "large inputs": (1, 37, 8, {"u": 1000.0}),
    "bfloat16": (2, 37, 24, {"dtype": "bfloat16", "documents": True}),
    "float16": (2, 37, 24, {"dtype": "float16", "padding": True}),
    "float32 out of bfloat16": (1, 37, 8, {"dtype": "bfloat16", "out": "float32"}),
}
interpreted = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")


@functools.cache
def program(argument: str, name: str = "conditioner_errors.py") -> dict:
    """What a program says, which runs once."""
    return json.loads(printed(str(SUPPORT / name), argument))


@interpreted
@pytest.mark.parametrize("case", [*FAST, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)])
def test_kernels_err_no_more_than_the_plain_form(case):
    """In float32 by at most twice as much, or 8 roundings; in 16 bits, where the kernels round less, by no more."""
    found = program(json.dumps(FAST if case in FAST else SLOW))[case]
    assert len(found) == (7 if case == "without a state before" else 8)
    factor = 1.02 if "float" in case else 2
    worse = {name: errors for name, errors in found.items() if not errors[0] <= max(factor * errors[1], 1e-6)}
    assert not worse, f"errors of the kernels and of the plain form: {worse}"


@interpreted
def test_a_layer_by_kernels_is_the_plain_one_twice_differentiable():
    far = program("layers")
    assert max(far["once"], far["no first norm, no bias"]) < 3e-6, far
    assert far["twice"] < 1e-5


@interpreted
@pytest.mark.slow
def test_a_compiled_layer_calls_the_kernels_in_one_graph():
    found = program("compiled")
    assert (found["graphs"], found["calls"]) == (1, 1)
    assert found["far"] < 3e-6


@interpreted
@pytest.mark.slow
def test_registers_of_an_h100_hold_a_tile():
    """Compiled for sm_90 without a card: no kernel spills more than two numbers of a thread."""
    for width, found in program("16,64,256", "conditioner_registers.py").items():
        assert all(kernel["spilled"] <= 8 for kernel in found.values()), (width, found)


@pytest.mark.parametrize("form", CONDITIONERS)
def test_the_plain_form_is_the_definition(form):
    projected, hidden = torch.randn(2, 23, 3 * 5, dtype=torch.float64), torch.randn(2, 5, dtype=torch.float64)
    keep, start = torch.rand(2, 23) > 0.3, torch.rand(2, 23) > 0.8
    norm = nn.LayerNorm(5).double()
    nn.init.normal_(norm.weight), nn.init.normal_(norm.bias)
    found = plain_condition(projected, Tokens(keep, start & keep, None, None), hidden, norm, ConvForm.named(form, 5))
    wanted = naive_conditioner(projected, norm.weight, norm.bias, keep, start & keep, hidden, form=form)
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)


class Watched(nn.LayerNorm):
    pass


def hooked() -> nn.LayerNorm:
    norm = nn.LayerNorm(8)
    norm.register_forward_hook(lambda *_: None)
    return norm


@interpreted
@pytest.mark.parametrize(
    "why, given",
    [
        ("the user asks for plain operations", {"backend": "plain"}),
        ("a CPU without the interpreter's asking", {"backend": "auto"}),
        ("float64", {"dtype": torch.float64}),
        ("more channels than a program holds", {"width": 129}),
        ("the same in 16 bits", {"width": 257, "dtype": torch.bfloat16}),
        ("no token", {"time": 0}),
        ("somebody watches the norm", {"norm": hooked()}),
        ("somebody watches the first norm", {"norm_in": hooked()}),
        ("an adapter", {"project": nn.Sequential(nn.Linear(8, 24))}),
        ("another norm", {"norm": Watched(8)}),
        ("a norm without weights", {"norm": nn.LayerNorm(8, elementwise_affine=False)}),
    ],
)
def test_the_plain_form_takes(why, given, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    usual = {"backend": "triton", "width": 8, "time": 3, "dtype": torch.float32}

    def taken(backend, width, time, dtype, norm=None, norm_in=None, project=None):
        maps = norm_in or nn.LayerNorm(8), project or nn.Linear(8, 3 * width), norm or nn.LayerNorm(width)
        return fits(backend, torch.zeros(1, time, 8, dtype=dtype), None, *maps)

    assert taken(**usual)
    assert not taken(**usual | given), why


@interpreted
def test_the_plain_form_takes_what_is_transformed(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    found = []

    def call(x):
        found.append(fits("triton", x, None, nn.Identity(), nn.Linear(8, 24), nn.LayerNorm(8)))
        return x.sum()

    torch.func.grad(call)(torch.zeros(1, 3, 8))
    assert found == [False]
