"""Linear attention by our kernels in Triton's interpreter, against float64: `test_kernels.py` runs this file.

A loop in torch stands in for the kernel of flash-linear-attention, of which `test_kernels.py` runs the real one.
"""

import interpreted  # noqa: F401  (before Triton)

# isort: split

import fla_reference
import pytest
import torch
import torch.nn.functional as F
import triton.language as tl
from reads import KEEPS_VALUES, KEYED, LAYOUTS, check, errors
from reads import draw_for_kernels as draw

from fem.ops.common import backend
from fem.ops.common.rope import frequencies, rotate_all
from fem.ops.linear_attention import fla_read, scan_kernels
from fem.ops.linear_attention.feature_kernels import features

torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)  # fresh memory is NaN: what nobody wrote shows
every_scan = pytest.mark.parametrize("name", KEYED)
REAL = fla_read.fla_read


@pytest.fixture(autouse=True)
def proven(monkeypatch):
    """Whether each call of the kernels proved its results."""
    found = []

    def told(*inputs):
        result = REAL(*inputs)
        found.append(result is not None)
        return result

    monkeypatch.setattr(backend, "_FOUND", {"fla": True, "triton": True})
    monkeypatch.setattr(fla_read, "by_fla", fla_reference.gla)
    monkeypatch.setattr(fla_read, "fla_read", told)
    return found


def marks_of(time, documents):
    """Masked tokens and documents."""
    if not documents:
        return {}
    marks = {"key_mask": torch.arange(time) % 5 != 3, "segment_ids": torch.arange(time) // 11}
    return {n: mark.expand(2, time) for n, mark in marks.items()}


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize(("time", "options"), [
    (1, {}), (2, {}), (17, {}), (64, {"free": 4}), (65, {"width": 3, "free": 9}), (127, {"width": 15}),
])  # fmt: skip
@every_scan
def test_reads_and_gradients_are_those_of_the_definition(proven, name, time, options, documents):
    check(draw(name, time, **options), 4e-6, **marks_of(time, documents))
    assert all(proven) or time <= 2  # of one or two tokens the values hardly differ


@every_scan
def test_kernels_that_are_miscompiled_are_not_called(monkeypatch, proven, name):
    monkeypatch.setattr(fla_read, "miscompiled", lambda device: True)
    check(draw(name, 33), 2e-6, **marks_of(33, True))
    assert all(proven)
    assert fla_read.multiplied(torch.zeros(1, dtype=torch.bfloat16), 0) == torch.float32


@every_scan
def test_rows_are_read_apart_where_a_grid_does_not_hold_them_all(monkeypatch, proven, name):
    check(draw(name, 41), 4e-6, exact="plain", sizes=(19, 22), **marks_of(41, True))
    calls = len(proven)
    monkeypatch.setattr(fla_read, "MOST_PROGRAMS", 1)
    check(draw(name, 41), 4e-6, exact="plain", sizes=(19, 22), **marks_of(41, True))
    assert all(proven)
    assert len(proven) == 4 * calls  # and each of two rows


@pytest.mark.parametrize("documents", [False, True])
@every_scan
def test_a_call_goes_on_from_a_state_and_leaves_one(proven, name, documents):
    """Gradients go through the states; pieces of kernels, of one token under a gradient too, are the whole."""
    call, marks = draw(name, 41), marks_of(41, documents)
    check(call, 4e-6, exact="plain", sizes=(19, 1, 21), **marks)
    assert proven == [True, False, True]  # the values of one token hardly differ
    parts, whole = (call.read(backend=name, **marks) for name in ("triton", "reference"))
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
@every_scan
def test_both_directions_and_free_energies_alone(proven, name, causal):
    call = draw(name, 33, width=0, free=5)
    call.rules["causal"] = causal
    check(call, 2e-6, key_mask=(torch.arange(33) > 4).expand(2, 33))
    assert proven == [True] * (1 + (not causal))


@every_scan
def test_a_mean_is_read_without_a_free_energy(name, proven):
    call = draw(name, 33).set(beta=None)
    (mean, none), (wanted, _) = (call.read(backend=backend) for backend in ("triton", "plain"))
    assert (none, proven) == (None, [True])
    torch.testing.assert_close(mean, wanted)


@pytest.mark.parametrize("change", [{"spike": 300.0}, {"span": 1e-3}, {"spike": 300.0, "decay": 20.0}])
@every_scan
def test_what_a_kernel_cannot_prove_is_computed_again(proven, name, change):
    """A value 300 nats above the others in the future; values that hardly differ; decays that flush weights to 0."""
    call = draw(name, 19, decay=change.get("decay", 0.1), free=4)
    changed = call.arguments["free_values"].clone()
    changed[:, 12] += change.get("spike", 0.0)
    check(call.set(free_values=100 + 1e-3 * changed if "span" in change else changed), 1e-4, exact="plain")
    assert not any(proven)


@pytest.mark.parametrize(("documents", "change"), [
    (False, {}), (False, {"doubt": 1e30}),
    *((True, change) for change in ({"spike": 300.0}, {"doubt": 1e30}, {"normalize": False}, {"causal": False})),
])  # fmt: skip
@every_scan
@torch.no_grad()
def test_without_gradients_the_card_reads_what_is_in_doubt(monkeypatch, proven, name, documents, change):
    """In pieces, which go on from a state, too."""
    monkeypatch.setattr(fla_read, "SETTLED", torch.float32)
    monkeypatch.setattr(
        scan_kernels, "LEAST_PROVEN", tl.constexpr(change.get("doubt", scan_kernels.LEAST_PROVEN.value))
    )
    call, marks = draw(name, 23, free=4), marks_of(23, documents)
    call.arguments["free_values"][:, 12] += change.get("spike", 0.0)
    call.rules.update({rule: change[rule] for rule in ("normalize", "causal") if rule in change})
    exact = call.map(torch.Tensor.double).read(backend="plain", **marks)
    found = [call.read(backend="triton", **marks)]
    if call.rules.get("causal", True):
        call.rules["backend"] = "triton"
        read, _ = call.with_state(9, 4, 10, **marks)
        found.append(read)
    for read in found:
        for one, wanted in zip(read, exact):
            assert (one - wanted).norm() <= 2e-5 * wanted.norm()
    assert all(proven)


@every_scan
def test_rows_and_key_channels_that_hold_nothing_read_zero(proven, name):
    call = draw(name, 19)
    call.arguments["k"][:, :4] = 0.0
    call.arguments["k"][:, :, :, 1] = 0.0
    check(call, 4e-6, exact="plain", sizes=(3, 9, 7))
    assert not any(x[:, :4].any() for x in call.read(backend="triton"))
    assert proven[-2]  # a key channel that holds nothing is in no doubt


@pytest.mark.parametrize("scale", [1e-20, 1e20])
@every_scan
def test_weights_of_any_size_are_summed(name, scale):
    call = draw(name, 33)
    check(call.set(k=scale * call.arguments["k"]), 4e-6, exact="plain", sizes=(20, 13))


@pytest.mark.parametrize("values", [1.0, 1e-2])
@every_scan
def test_bfloat16_values_are_read_to_their_precision(proven, name, values):
    """Also where they hardly differ. Gradients of queries are differences, of which two columns keep the digits."""
    call = draw(name, 65, torch.bfloat16, width=8)
    call = call.set(v=(values * call.arguments["v"].float()).bfloat16())
    (mean, free), exact = call.read(backend="triton"), call.map(torch.Tensor.double).read(backend="plain")
    assert (mean.dtype, free.dtype, proven) == (torch.bfloat16, torch.bfloat16, [True])
    for found, wanted in zip((mean, free), exact):
        assert (found.double() - wanted).norm() <= 1e-2 * call.arguments["v"].double().norm()
    gradients = [error for error, _ in errors(call, (("plain", torch.float64), ("plain", None), ("triton", None)))][2:]
    assert values < 1 or max(gradients) <= 1.25e-2, gradients


@pytest.mark.parametrize("layout", KEEPS_VALUES)
@every_scan
def test_a_kernel_reads_tensors_however_they_lie(proven, name, layout):
    call = draw(name, 17, free=4)
    strange = {n: LAYOUTS[layout](x) for n, x in call.along.items()}
    strange = call.set(**strange, beta=call.arguments["beta"].T.contiguous().T)
    torch.testing.assert_close(strange.read(backend="triton"), call.read(backend="triton"), rtol=0, atol=0)
    assert proven == [True, True]


@every_scan
def test_leaves_are_read_in_inference_mode(proven, name):
    call = draw(name, 17).leaves()
    with torch.inference_mode():
        found = call.read(backend="triton")
    torch.testing.assert_close(found, call.read(backend="triton"), rtol=0, atol=0)
    assert proven == [True, True]


@every_scan
def test_float16_values_keep_their_digits(proven, name):
    check(draw(name, 65, torch.float16, width=8), 2e-3, exact="plain")
    assert all(proven)


@every_scan
def test_a_loss_of_the_last_state_only_has_gradients(proven, name):
    found = []
    for by in ("plain", "triton"):
        call = draw(name, 33).leaves()
        _, state = call.read(backend=by, return_state=True)
        total = sum(x.square().sum() for x in state.memory.values())
        found.append(torch.autograd.grad(total, call.tensors(), materialize_grads=True))
    assert proven == [True]
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


@every_scan
def test_second_derivatives_are_those_of_the_plain_form(proven, name):
    found = []
    for by, dtype in (("plain", torch.float64), ("triton", torch.float32)):
        call = draw(name, 9).leaves(dtype)
        read = call.read(backend=by)
        leaves = call.tensors()
        torch.manual_seed(1)
        first = torch.autograd.grad(sum((x * torch.randn(x.shape)).sum() for x in read), leaves, create_graph=True)
        found.append(torch.autograd.grad(sum(x.square().sum() for x in first), leaves))
    assert proven == [True]
    for wanted, one in zip(*found):
        assert (one - wanted).norm() <= 1e-4 * wanted.norm().clamp_min(1)


@every_scan
def test_a_gradient_that_is_undefined_is_passed_on(name):
    call = draw(name, 5).leaves()
    sum(torch._C._functions.UndefinedGrad()(part).sum() for part in call.read(backend="triton")).backward()
    assert not any(x.grad is not None and x.grad.any() for x in call.tensors())


def test_gradients_repeat_and_a_graph_may_be_used_twice(proven):
    call = draw("gla", 33).leaves()
    total, leaves = sum(x.sum() for x in call.read(backend="triton")), call.tensors()
    first, second = (torch.autograd.grad(total, leaves, retain_graph=True) for _ in range(2))
    assert (all(map(torch.equal, first, second)), proven) == (True, [True])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("position", [None, torch.arange(7) + 5, torch.arange(14).view(2, 7) * 7919])
def test_features_and_their_gradients(dtype, position):
    """phi(x) = ReLU(RoPE(x)) + eps, differentiable any number of times; what eps rounds away has no gradient."""
    eps, x = 3e-3, [torch.randn(2, 7, 3, 6).to(dtype).requires_grad_() for _ in "qk"]  # bfloat16 rounds it up
    turns = None if position is None else frequencies(6, 1e4, x[0].device)
    exact = [part.detach().double().requires_grad_() for part in x]
    wanted = [F.relu(part) + eps for part in (exact if position is None else rotate_all(exact, position, turns))]
    found = features(*x, position, turns, 1.0, eps)
    cotangents, limit = [torch.randn(2, 7, 3, 6) for _ in "qk"], 4 * torch.finfo(dtype).eps
    pull = lambda y, to, **how: torch.autograd.grad(  # noqa: E731
        sum((part.double() * d.double()).sum() for part, d in zip(y, cotangents)), to, **how
    )
    for create_graph in (False, True):
        gradients = pull(found, x, retain_graph=True, create_graph=create_graph)
        for one, other in zip([*found, *gradients], [*wanted, *pull(wanted, exact, retain_graph=True)]):
            torch.testing.assert_close(one.double(), other, rtol=limit, atol=4 * limit)
