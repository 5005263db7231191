"""The kernels of the state space scan against float64: run as kernels_channel_scan.py is.

python -m pytest tests/ops/recurrent/kernels_ssm.py -o addopts=
"""

import pytest
import recurrences
import torch
from interpreter import DEVICE, patch_the_language_once
from recurrences import (
    Case,
    case,
    check_gradients_through_the_state,
    check_that_backends_continue_each_other,
    error,
    gradients,
    state_equation,
)
from torch.library import opcheck

from fem import FreeEnergyMixer, FreeEnergyMixerConfig
from fem.ops.decay_scan.kernels import launch as decay_scan_triton
from fem.ops.ssm.kernels import launch as ssm_triton
from fem.ops.ssm.read import ssm_terms

CHUNK = 4
patch_the_language_once()
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def on_device_in_short_chunks(monkeypatch):
    monkeypatch.setattr(decay_scan_triton, "CHUNK", CHUNK)
    with torch.device(DEVICE):
        yield


def compare(inputs, exact=None, **options):
    """Forward and every gradient against the definition in float64."""
    mine, theirs = inputs.leaves(), inputs.map(lambda x: x.double()).leaves()
    got, wanted = mine.read(backend="triton", **options), (exact or type(theirs).definition)(theirs, **options)
    seen = options.get("key_mask", torch.ones(wanted[0].shape[:2])).bool()
    weights = [torch.randn_like(part) * seen[:, :, None, None] for part in wanted]
    for name, one, other in zip(("mean", "free_energy"), got, wanted, strict=True):
        assert one.dtype == torch.float32
        assert error(one[seen], other[seen]) < 5e-6, name
    expected = gradients(wanted, theirs, weights)
    for name, gradient in gradients(got, mine, weights).items():
        scale = (
            0.1 if name != "beta" else inputs.along["v"].abs().max() + 0.1
        )  # beta's is a difference of averages of v
        assert error(gradient, expected[name], scale) < 1e-5, name


@pytest.mark.parametrize(("time", "causal"), [(1, True), (1, False), (CHUNK, True), (9, True), (9, False)])
def test_read_and_gradients_are_those_of_the_definition(time, causal):
    compare(case("ssm", time), causal=causal)


def test_read_and_gradients_at_the_tile_sizes_that_ship(monkeypatch):
    monkeypatch.setattr(decay_scan_triton, "CHUNK", 64)
    monkeypatch.setattr(recurrences, "WIDTH", 8)
    monkeypatch.setattr(recurrences, "RANK", 16)
    inputs = case("ssm", 65, batch=1)
    grid, blocks = ssm_triton.cut(inputs.along["v"].flatten(2), 16)
    assert (grid, blocks["BLOCK"] * blocks["PADDED"]) == ((1, 2, 1), ssm_triton._STATES)
    compare(inputs)


def test_gradients_where_a_program_takes_several_chunks_of_some_channels(monkeypatch):
    monkeypatch.setattr(ssm_triton, "_STATES", 16)
    monkeypatch.setattr(ssm_triton, "_PROGRAMS", 4)
    inputs = case("ssm", 4 * CHUNK + 1, batch=1)
    assert ssm_triton.cut(inputs.along["v"].flatten(2), 4)[0] == (2, 5, 1)
    compare(inputs)


@pytest.mark.parametrize(("causal", "normalize"), [(True, True), (True, False), (False, True)])
def test_masks_and_documents_are_those_of_the_definition(causal, normalize):
    mask = torch.tensor([[0, 0, 1, 1, 0, 1, 1, 0, 1], [1, 1, 1, 0, 0, 1, 1, 1, 1]])
    ids = torch.tensor([[5, 5, 5, 2, 7, 2, 5, 5, 5], [0, 0, 1, 9, 1, 1, 1, 0, 0]])
    compare(case("ssm", 9), causal=causal, normalize=normalize, key_mask=mask, segment_ids=ids)


@pytest.mark.parametrize("span", [0, 80, 500])
def test_any_span_of_values(span):
    inputs = case("ssm", 9, batch=1)
    compare(inputs.set(v=torch.rand_like(inputs.along["v"]) * span / 2))


@pytest.mark.parametrize("level", [0.0, -90.0, -1000.0])
def test_any_decay(level):
    inputs = case("ssm", 11, batch=1)
    delta = torch.ones_like(inputs.along["delta"])
    compare(inputs.set(A=torch.full_like(inputs.shared["A"], level), delta=delta))


def test_a_spike_that_decayed_away_leaves_no_trace():
    inputs = case("ssm", 11, batch=1)
    v, delta = inputs.along["v"].clone(), inputs.along["delta"].clone()
    v[:, 2], delta[:, 5:7] = 250.0, 500.0
    compare(inputs.set(v=v, delta=delta))


def test_a_state_that_is_not_read_may_hold_a_spike():
    inputs = case("ssm", 11, batch=1)
    v, c = inputs.along["v"].clone(), inputs.along["C"].clone()
    v[:, 2], c[:, 3:, 0] = 300.0, 0.0  # the state that keeps the spike
    rate = inputs.shared["A"].clone() - 30
    rate[..., 0] = 0.0
    mine = inputs.set(v=v, C=c, A=rate).leaves()
    got, wanted = mine.read(backend="triton"), mine.definition()
    for one, other in zip(got, wanted, strict=True):
        assert error(one[:, 5:], other[:, 5:]) < 1e-5
    for gradient in gradients(got, mine, [torch.ones_like(part) for part in wanted]).values():
        assert gradient.isfinite().all()


@pytest.mark.parametrize("name", ["delta", "B", "C", "D", "A"])
def test_zeros_have_the_exact_gradient(name):
    inputs = case("ssm", 9)
    tensor = inputs.tensors()[name]
    some = torch.rand_like(tensor) > 0.4
    if name in inputs.along:
        some[:, 0] = True  # a state that nothing entered yet has no scale to measure its gradient by
    compare(inputs.set(**{name: tensor * some}), state_equation)


def test_a_row_without_weight_reads_zero_and_passes_no_gradient():
    inputs = case("ssm", 9)
    c = inputs.along["C"].clone()
    c[:, 4] = 0
    mine = inputs.set(C=c, D=torch.zeros_like(inputs.shared["D"])).leaves()
    read = mine.read(backend="triton")
    assert all((part[:, 4] == 0).all() for part in read)
    for gradient in gradients([part[:, 4:5] for part in read], mine, [torch.ones(2, 1, 2, 3)] * 2).values():
        assert (gradient == 0).all()


def test_gradients_pass_through_the_state():
    check_gradients_through_the_state(case("ssm", 9), 5e-6, 1e-5)


def test_the_plain_scan_continues_the_state_of_the_kernels_and_they_its():
    check_that_backends_continue_each_other(case("ssm", 12))


def test_any_number_of_states():
    for rank in (1, 3):
        inputs = case("ssm", 6)
        shared, along = inputs.shared, inputs.along
        few = {"A": shared["A"][..., :rank], "B": along["B"][..., :rank], "C": along["C"][..., :rank]}
        compare(inputs.set(**few))


def test_future_tokens_change_no_bit():
    inputs = case("ssm", 9)
    before = inputs.read(backend="triton")
    changed = inputs.map(torch.clone)
    changed.along["v"][:, 6:] = 1e4
    for got, wanted in zip(changed.read(backend="triton"), before, strict=True):
        assert torch.equal(got[:, :6], wanted[:, :6])


def test_gradients_repeat_bit_by_bit():
    inputs, runs = case("ssm", 6, spread=20.0).leaves(), []
    for _ in range(2):
        read = inputs.read(backend="triton")
        runs.append(gradients(read, inputs, [torch.ones_like(part) for part in read]))
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])


def test_the_mean_alone_needs_no_beta():
    inputs = case("ssm", 9)
    one, other = (inputs.leaves() for _ in range(2))
    alone, both = one.set(beta=None).read(backend="triton"), other.read(backend="triton")
    assert alone.free_energy is None
    torch.testing.assert_close(alone.mean, both.mean)
    leaves = [[leaves.tensors()[name] for name in ("v", "delta", "A", "B", "C", "D")] for leaves in (one, other)]
    for got, wanted in zip(*(torch.autograd.grad(r.mean.sum(), x) for r, x in zip((alone, both), leaves)), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_training_keeps_no_state_per_token():
    inputs, kept = case("ssm", 16, batch=1).leaves(), {}
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.setdefault(x.data_ptr(), x), lambda x: x):
        inputs.read(backend="triton")
    v, rank = inputs.along["v"], inputs.shared["A"].shape[-1]
    assert sum(x.numel() for x in kept.values()) < 10 * v.numel() + 7 * v.numel() * rank / CHUNK + 4 * 7 * 6


def test_the_operators_keep_to_what_they_are_registered_as():
    v, b = torch.rand(1, 5, 3).requires_grad_(), torch.rand(1, 5, 2).requires_grad_()
    rate, some, opens = -torch.rand(2, 3), torch.rand(3), torch.zeros(1, 5, dtype=torch.int8)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    for skip, beta, opens_, parts in ((some, some, None, 6), (None, None, opens, 3)):
        for log_delta in (None, v):
            arguments = (v, rate, b, b, skip, v, beta, opens_, log_delta, torch.ones(parts, 1, 6))
            opcheck(ssm_triton._forward, arguments, test_utils=checks)


def test_float64_is_refused():
    with pytest.raises(ValueError, match="computes in float32, got float64"):
        case("ssm", 3, dtype=torch.float64).read(backend="triton")


def by_logarithms(inputs, backend, **options):
    given = inputs.tensors()
    numbers = (given[name].exp() for name in ("log_delta", "log_B", "log_C"))
    delta, b, c = (x.detach() for x in numbers)
    logs = tuple(given[name] for name in ("log_delta", "log_B", "log_C"))
    terms, state = ssm_terms(
        delta, given["A"], b, c, given["D"], given["v"], given["beta"], logs=logs, backend=backend, **options
    )
    return [*terms, *((state or {}).values())]


@pytest.mark.parametrize("options", [{}, {"return_state": True}, {"causal": False}])
def test_logarithms_of_weights_that_no_number_holds(options):
    inputs = case("ssm", 11, batch=1)
    along, shared = inputs.along, inputs.shared
    faint = torch.zeros(11)
    faint[2:6] = -200.0  # less than any float32
    logs = {f"log_{name}": along[name].log() + faint.view(1, 11, *[1] * (along[name].ndim - 2)) for name in ("B", "C")}
    logs["log_delta"] = along["delta"].log() + 2 * faint.view(1, 11, 1, 1)
    inputs = Case("ssm_read", (), logs | {"v": along["v"]}, shared | {"D": torch.full_like(shared["D"], 1e-30)})
    mine, exact = inputs.leaves(), inputs.map(lambda x: x.double()).leaves()
    got, wanted = by_logarithms(mine, "triton", **options), by_logarithms(exact, "plain", **options)
    for one, other in zip(got[:3], wanted[:3], strict=True):
        assert error(one, other) < 5e-6
    weights = [torch.randn_like(part) for part in wanted[:3]]
    expected = gradients(wanted[:3], exact, weights)
    for name, gradient in gradients(got[:3], mine, weights).items():
        if name != "D":  # is 1 / 1e-30, but for rounding
            assert error(gradient, expected[name], along["v"].abs().max() + 0.1) < 2e-5, name


def test_an_outlier_token_leaves_no_trace_in_a_mamba_layer():
    config = {"n_embd": 16, "n_head": 2, "prior_type": "mamba", "ssm_rank": 4, "use_conv": False}
    layer = FreeEnergyMixer(FreeEnergyMixerConfig(**config, backend="triton"))
    exact = FreeEnergyMixer(FreeEnergyMixerConfig(**config, backend="plain")).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    exact.load_state_dict(layer.state_dict())
    x = torch.randn(1, 12, 16)
    x[:, 3] += 300.0
    torch.testing.assert_close(layer(x).double(), exact(x.double()), rtol=1e-4, atol=1e-4)


def test_a_mamba_layer_reads_by_the_kernels():
    config = {"n_embd": 16, "n_head": 2, "prior_type": "mamba", "ssm_rank": 4, "use_conv": False}
    layers = [FreeEnergyMixer(FreeEnergyMixerConfig(**config, backend=backend)) for backend in ("triton", "plain")]
    layers[1].load_state_dict(layers[0].state_dict())
    x, mask = torch.randn(1, 7, 16), torch.rand(1, 7) > 0.2
    one, other = (layer(x, attention_mask=mask) for layer in layers)
    torch.testing.assert_close(one[mask], other[mask], rtol=1e-4, atol=1e-5)
