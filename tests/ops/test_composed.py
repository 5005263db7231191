"""Scans by the kernels of others: the same reads and gradients as the definition in float64, whatever the kernel loses.

Torch operations stand in for the kernels, with their signatures; test_fla.py runs the kernels themselves.
"""

import os
import subprocess
import sys

import fla_reference
import pytest
import torch

from fem.functional import channel_scan_read, decay_scan, keyed_scan_read, ssm_read
from fem.ops.channel_scan import channel_scan_read as of_channels
from fem.ops.common import backend, recurrence
from fem.ops.decay_scan import decaying_sum as of_sums
from fem.ops.linear_attention import linear_attention_read as of_keys
from fem.ops.ssm import ssm_read as of_ssm

B, H, K, V, F = 2, 2, 3, 4, 3


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(backend, "_FOUND", {"fla": True, "mamba_ssm": True, "triton": True})
    monkeypatch.setattr(of_keys, "by_fla", fla_reference.gla)
    for module in (recurrence, of_sums):
        monkeypatch.setattr(module, "by_hgrn", fla_reference.hgrn)
    monkeypatch.setattr(of_ssm, "mamba_kernel", fla_reference.selective_scan)


def keyed(time, dtype, decay):
    q, k, v, f = torch.rand(B, time, H, K) + 0.1, torch.rand(B, time, H, K), *torch.randn(2, B, time, H, V)
    g = None if decay is None else -torch.rand(B, time, H, *([K] if decay == "channel" else [])) / 8
    beta = torch.rand(H, V) + 0.5
    inputs = {"q": q, "k": k, "v": v.to(dtype), "beta": beta, "log_decay": g, "free_values": f.to(dtype)}
    return keyed_scan_read, inputs


def channel(time, dtype, decay):
    x, a = torch.randn(B, time, H, V), -torch.rand(B, time, H, V)
    inputs = {"log_weight": x, "v": torch.randn(B, time, H, V).to(dtype), "beta": torch.rand(H, V) + 0.5}
    return channel_scan_read, inputs | {"log_decay": a if decay else None}


def ssm(time, dtype, skip):
    delta, b, c = (torch.rand(B, time, *shape) + 0.1 for shape in ((H, V), (F,), (F,)))
    inputs = {"delta": delta, "A": -torch.rand(H, V, F), "B": b, "C": c, "D": skip * (torch.rand(H, V) + 0.1)}
    return ssm_read, inputs | {"v": torch.randn(B, time, H, V).to(dtype), "beta": torch.rand(H, V) + 0.5}


def results(read, inputs, dtype, backend, **options):
    leaves = {n: None if x is None else x.to(dtype or x.dtype).requires_grad_() for n, x in inputs.items()}
    found = read(**leaves, backend=backend, **options)
    torch.manual_seed(1)
    loss = sum((torch.randn(x.shape).to(x.dtype) * x).sum() for x in found)
    return [*found, *torch.autograd.grad(loss, [x for x in leaves.values() if x is not None])]


def check(read, inputs, limit, **options):
    """Against float64, the kernel's results err by at most twice the plain form's, or `limit` of the norm."""
    wanted = results(read, inputs, torch.float64, "plain", **options)
    plain, found = (results(read, inputs, None, name, **options) for name in ("plain", "triton"))
    for one, other, exact in zip(found, plain, wanted, strict=True):
        error, floor = ((x.double() - exact).norm() / exact.norm().clamp_min(1e-3) for x in (one, other))
        assert error <= max(2 * floor, limit), (error, floor)


CASES = [(keyed, None), (keyed, "head"), (keyed, "channel"), (channel, None), (channel, "yes")]
CASES += [(ssm, 1.0), (ssm, 1e-30)]
MASKED = {"key_mask": lambda t: torch.arange(t) % 5 != 3, "segment_ids": lambda t: torch.arange(t) // 11}


@pytest.mark.parametrize("time", [2, 17, 64, 65, 127])
@pytest.mark.parametrize("draw, decay", CASES)
def test_a_kernel_reads_what_the_definition_says(draw, decay, time):
    torch.manual_seed(0)
    options = {name: make(time).expand(B, time) for name, make in MASKED.items()} if time % 2 else {}
    if draw is ssm:  # its kernel knows no documents
        options.pop("segment_ids", None)
    check(*draw(time, torch.float32, decay), 2e-6, **options)


@pytest.mark.parametrize("draw, decay", CASES)
def test_bfloat16_values_are_read_to_their_precision(draw, decay):
    torch.manual_seed(0)
    check(*draw(65, torch.bfloat16, decay), 5e-2)


@pytest.mark.parametrize("change", [{"spike": 300.0}, {"span": 1e-3}, {"spike": 300.0, "decay": -40.0}])
@pytest.mark.parametrize("draw, decay", CASES)
def test_what_a_kernel_cannot_prove_is_computed_again(draw, decay, change):
    """A value 300 nats above the others in the future; values that hardly differ; decays that flush weights to 0."""
    torch.manual_seed(0)
    read, inputs = draw(33, torch.float32, decay)
    name = "free_values" if "free_values" in inputs else "v"
    if "span" in change:
        inputs[name] = 100 + change["span"] * inputs[name]
    else:
        inputs[name][:, 20] += change["spike"]
    if "decay" in change and decay:
        decays = inputs["A" if read is ssm_read else "log_decay"]
        decays += change["decay"]
    check(read, inputs, 1e-4)


@pytest.mark.parametrize("width", [3, 16])
@pytest.mark.parametrize("draw, decay", [case for case in CASES if case[0] is not ssm or case[1] == 1.0])
def test_free_energies_alone_are_read_by_a_kernel(monkeypatch, draw, decay, width):
    """Layers without a temperature gate read no mean; the kernel reads all the same, and its proof does not fail."""
    torch.manual_seed(0)
    monkeypatch.setitem(globals(), "V", width)
    read, inputs = draw(33, torch.float32, decay)
    inputs["free_values"], inputs["v"] = inputs["v"], inputs["v"][..., :0]
    monkeypatch.setattr(of_channels.CHANNEL_SCAN, "exact", None)
    monkeypatch.setattr(of_ssm.SSM_SCAN, "exact", None)
    by_kernels = of_keys._by_kernels

    def proven(*inputs):
        found = by_kernels(*inputs)
        assert found is not None
        return found

    monkeypatch.setattr(of_keys, "_by_kernels", proven)
    masks = {"key_mask": (torch.arange(33) > 4).expand(B, 33)} if read is keyed_scan_read else {}
    check(read, inputs, 2e-6, **masks)


def test_weights_below_the_range_of_a_kernel_are_computed_again():
    torch.manual_seed(0)
    read, inputs = ssm(17, torch.float32, 0.0)
    for name in ("B", "C"):
        inputs[name] *= 1e-22
    check(read, inputs, 1e-4)


def test_a_row_without_weight_reads_zero_by_a_kernel():
    read, inputs = keyed(9, torch.float32, None)
    inputs["k"][:, :4] = 0
    assert not read(**inputs, backend="triton").mean[:, :4].any()
    read, inputs = channel(9, torch.float32, None)
    inputs["log_weight"][:, :4] = -torch.inf
    found = read(**inputs, backend="triton")
    assert not found.mean[:, :4].any()
    assert not found.free_energy[:, :4].any()


def test_a_decaying_sum_by_a_kernel_goes_on_from_its_state():
    a, u, h = -torch.rand(2, 9, 5), torch.randn(2, 9, 5), torch.randn(2, 5)
    leaves = [x.requires_grad_() for x in (a, u, h)]
    found, wanted = (decay_scan(*leaves, backend=name) for name in ("triton", "plain"))
    torch.testing.assert_close(found, wanted)
    for one, other in zip(*(torch.autograd.grad(x.square().sum(), leaves) for x in (found, wanted))):
        torch.testing.assert_close(one, other)


WHOLE = """
import fla_reference, os, torch
os.environ["TRITON_INTERPRET"] = "1"
from fem import FreeEnergyMixer, FreeEnergyMixerConfig
from fem.ops.common import backend, recurrence
from fem.ops.linear_attention import linear_attention_read as of_keys
from fem.ops.ssm import ssm_read as of_ssm
torch.set_num_threads(1)
backend._FOUND = {"fla": True, "mamba_ssm": True, "triton": True}
of_keys.by_fla, recurrence.by_hgrn, of_ssm.kernel = fla_reference.gla, fla_reference.hgrn, fla_reference.selective_scan
for prior in ("linear", "gla", "rnn_softmax", "rnn_decay", "mamba", "mamba_interactive"):
    fields = {"n_embd": 16, "n_head": 2, "prior_type": prior}
    layer, plain = (FreeEnergyMixer(FreeEnergyMixerConfig(**fields, backend=name)) for name in ("triton", "plain"))
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(2, 19, 16)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    wanted = torch.autograd.grad(plain(x).square().sum(), list(plain.parameters()))
    for call in (layer, compiled):
        torch.testing.assert_close(call(x), plain(x), rtol=1e-4, atol=1e-5)
        found = torch.autograd.grad(call(x).square().sum(), list(layer.parameters()))
        for one, other in zip(found, wanted):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
print("whole")
"""


@pytest.mark.slow
def test_a_layer_by_kernels_compiles_as_one_graph_and_equals_the_plain_one():
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", WHOLE], env=environment, capture_output=True, text=True)
    assert done.stdout == "whole\n", done.stderr[-2000:]


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
