"""Scans by the kernels of others: the same reads and gradients as the definition in float64, whatever the kernel loses.

Torch operations stand in for the kernels, with their signatures; test_kernels.py runs the kernels themselves, and our
own, which stand around those of linear attention and read channels and state spaces.
"""

import fla_reference
import pytest
import torch
from processes import printed
from reads import check, draw_for_kernels

from fem.functional import decay_scan, keyed_scan_read
from fem.ops.common import backend
from fem.ops.decay_scan import decaying_sum as of_sums
from fem.ops.ssm import ssm_read as of_ssm

every_case = pytest.mark.parametrize("name", ["ssm", "ssm without a skip"])


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(backend, "_FOUND", {"fla": True, "mamba_ssm": True, "triton": True})
    monkeypatch.setattr(of_sums, "by_hgrn", fla_reference.hgrn)
    monkeypatch.setattr(of_ssm, "mamba_kernel", fla_reference.selective_scan)


def draw(name, time, *dtype, **options):
    call = draw_for_kernels("ssm", time, *dtype, **options)
    return call.set(D=1e-30 * call.arguments["D"]) if "skip" in name else call


@pytest.mark.parametrize("time", [2, 17, 64, 65, 127])
@every_case
def test_a_kernel_reads_what_the_definition_says(name, time):
    check(draw(name, time), 2e-6, key_mask=(torch.arange(time) % 5 != 3).expand(2, time) if time % 2 else None)


@every_case
def test_bfloat16_values_are_read_to_their_precision(name):
    check(draw(name, 65, torch.bfloat16), 5e-2)


@pytest.mark.parametrize("change", [{"spike": 300.0}, {"span": 1e-3}, {"spike": 300.0, "decay": 20.0}])
@every_case
def test_what_a_kernel_cannot_prove_is_computed_again(name, change):
    """A value 300 nats above the others in the future; values that hardly differ; decays that flush weights to 0."""
    call = draw(name, 19, decay=change.get("decay", 0.1)).spiked(change.get("spike", 0.0), 12)
    check(call.set(v=100 + 1e-3 * call.arguments["v"]) if "span" in change else call, 1e-4)


@pytest.mark.parametrize("width", [3, 16])
def test_free_energies_alone_are_read_by_a_kernel(monkeypatch, width):
    """Layers without a temperature gate read no mean; the kernel reads all the same, and its proof does not fail."""
    monkeypatch.setattr(of_ssm.SSM_SCAN, "exact", None)
    check(draw("ssm", 33, width=0, free=width), 2e-6, exact="plain")


def test_weights_below_the_range_of_a_kernel_are_computed_again():
    call = draw("ssm", 17)
    weak = {n: 1e-22 * call.arguments[n] for n in "BC"}
    check(call.set(**weak, D=torch.zeros_like(call.arguments["D"])), 1e-4)


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
from fem.ops.ssm import ssm_read as of_ssm
torch.set_num_threads(1)
backend._FOUND = {"fla": True, "mamba_ssm": True, "triton": True}
fla_read.by_fla = fla_reference.gla
of_ssm.mamba_kernel = fla_reference.selective_scan
for prior in PRIORS.keys() - {"softmax"}:
    fields = {"n_embd": 16, "n_head": 2, "prior_type": prior}
    layer, plain = (FreeEnergyMixer(FreeEnergyMixerConfig(**fields, backend=name)) for name in ("triton", "plain"))
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(2, 19, 16)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
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
