"""Scans by the kernels of others: which calls take them, and that they agree with the plain form.

Torch operations stand in for the kernels, with their signatures; test_kernels.py runs the kernels themselves, and our
own, which stand around those of linear attention and read channels and state spaces.
"""

import fla_reference
import pytest
import torch
from processes import printed

from fem.functional import decay_scan, keyed_scan_read
from fem.ops.common import backend
from fem.ops.decay_scan import decaying_sum as of_sums


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(backend, "_FOUND", {"fla": True, "triton": True})
    monkeypatch.setattr(of_sums, "by_hgrn", fla_reference.hgrn)


def test_a_decaying_sum_by_a_kernel_goes_on_from_its_state():
    leaves = [x.requires_grad_() for x in (-torch.rand(2, 9, 5), torch.randn(2, 9, 5), torch.randn(2, 5))]
    found, wanted = (decay_scan(*leaves, backend=name) for name in ("triton", "plain"))
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(*(torch.autograd.grad(x.square().sum(), leaves) for x in (found, wanted)))


WHOLE = """
import fla_reference, os, torch
os.environ["TRITON_INTERPRET"] = "1"
from fem import PRIORS, FreeEnergyMixer, FreeEnergyMixerConfig
from fem.ops.common import backend
from fem.ops.linear_attention import fla_read
torch.set_num_threads(1)
backend._FOUND = {"fla": True, "triton": True}
fla_read.by_fla = fla_reference.gla
for prior in PRIORS.keys() - {"softmax"}:
    torch.compiler.reset()
    fields = {"n_embd": 16, "n_head": 2, "prior_type": prior}
    layer, plain = (FreeEnergyMixer(FreeEnergyMixerConfig(**fields, backend=name)) for name in ("triton", "plain"))
    plain.load_state_dict(layer.state_dict())
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for x in torch.randn(2, 19, 16), torch.randn(2, 1, 16):
        wanted = torch.autograd.grad(plain(x).square().sum(), list(plain.parameters()))
        for call in (layer, compiled):
            torch.testing.assert_close(call(x), plain(x), rtol=1e-4, atol=1e-5)
            found = torch.autograd.grad(call(x).square().sum(), list(layer.parameters()))
            torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-5)
print("whole")
"""


@pytest.mark.slow
def test_a_layer_by_kernels_compiles_as_one_graph_and_equals_the_plain_one():
    assert printed("-c", WHOLE) == "whole\n"


def test_kernels_are_asked_for_where_they_are(monkeypatch):
    x = torch.rand(1, 4, 1, 2)
    with pytest.raises(ValueError, match="at most 32 bits"):
        keyed_scan_read(x.double(), x.double(), x.double(), None, backend="triton")
    monkeypatch.setitem(backend._FOUND, "fla", False)
    with pytest.raises(ValueError, match=r"fla-core.*pip install fla-core einops"):
        keyed_scan_read(x, x, x, None, backend="triton")
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ValueError, match="needs CUDA"):
        keyed_scan_read(x, x, x, None, backend="triton")


def test_a_gpu_without_kernels_says_once_what_to_install(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(backend, "_FOUND", {"fla": False})
    monkeypatch.setattr(backend, "_MISSED", set())
    gpu = torch.device("cuda")
    with pytest.warns(UserWarning, match="pip install") as said:
        names = [backend.scan_backend("auto", gpu, torch.float32) for _ in range(3)]
    assert names == ["plain"] * 3
    assert len(said) == 1
