"""The conditioner's kernels in Triton's interpreter, its plain form, and which calls either takes."""

import json
from pathlib import Path

import pytest
import torch
from naive_conditioner import naive_conditioner
from processes import needs_triton, printed, run_cases
from torch import nn

from fem.config import CONDITIONERS
from fem.ops.common.tokens import Tokens
from fem.ops.conditioner.fused_conditioner import fits
from fem.ops.conditioner.plain_conditioner import ConvForm, plain_condition

CASES = Path(__file__).with_name("conditioner_cases.py")


@needs_triton
@pytest.mark.slow
def test_kernels_err_no_more_than_the_plain_form_and_a_layer_by_them_is_the_plain_one():
    run_cases(CASES, "test")


@needs_triton
@pytest.mark.slow
def test_registers_of_an_h100_hold_a_tile():
    """Compiled for sm_90 without a card: no kernel spills more than two numbers of a thread."""
    for width, found in json.loads(printed("-m", "conditioner_registers", "16,64,256")).items():
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


@needs_triton
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


@needs_triton
def test_the_plain_form_takes_what_is_transformed(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    found = []

    def call(x):
        found.append(fits("triton", x, None, nn.Identity(), nn.Linear(8, 24), nn.LayerNorm(8)))
        return x.sum()

    torch.func.grad(call)(torch.zeros(1, 3, 8))
    assert found == [False]
