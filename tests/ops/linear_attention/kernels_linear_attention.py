"""The Triton kernels of linear attention against float64: interpreted (tests/ops/test_kernels.py), or on a GPU.

python -m pytest tests/ops/linear_attention/kernels_linear_attention.py -o addopts=
"""

from functools import partial

import linear_attention
import pytest
import torch
from interpreter import DEVICE, INTERPRETED, patch_the_language_once
from linear_attention import draw_memory
from operations import counted
from torch.library import opcheck

from fem import FreeEnergyMixer, FreeEnergyMixerConfig
from fem.functional import keyed_scan_read
from fem.ops.common.fallback_count import fallbacks
from fem.ops.linear_attention.kernels import launch as linear_attention_triton
from fem.ops.linear_attention.kernels.blocks import blocks_for
from fem.ops.linear_attention.naive import naive_linear_attention_read
from fem.ops.linear_attention.read import linear_attention_terms

DECAYS = [None, "head", "channel"]
patch_the_language_once()
draw = partial(linear_attention.draw, time=37, batch=1, heads=1)
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def on_device():
    with torch.device(DEVICE):
        yield


def started(memory, batch):
    """The state of a public call that starts from what the memory holds."""
    one = torch.ones(batch, 1, 1, 1)
    free = one[0, 0] if "free_energy" in memory else None
    state = keyed_scan_read(one, one, one, free, return_state=True)[1]
    return type(state)(memory, type(state.cache_position).zero(batch, DEVICE))


def close(got, wanted, floor, name):
    assert got.dtype == torch.float32
    wanted = wanted.double()
    error = (got.double() - wanted).abs().max().item()
    assert error <= 1e-5 * wanted.abs().max().item() + floor, f"{name}: off by {error} of {wanted.abs().max()}"


def check(tensors, memory=None, key_mask=None, segment_ids=None, **options):
    """Reads, final state and all gradients against the definition."""
    memory = memory or {}
    tensors = {name: None if x is None else x.requires_grad_() for name, x in tensors.items()}
    memory = {name: x.requires_grad_() for name, x in memory.items()}
    leaves = {name: x for name, x in (tensors | memory).items() if x is not None}
    supports, causal = {"key_mask": key_mask, "segment_ids": segment_ids}, options.get("causal", True)
    state = started(memory, len(tensors["q"])) if memory else None
    got = keyed_scan_read(**tensors, **supports, **options, initial_state=state, return_state=causal, backend="triton")
    read, last = (got[0], got[1].memory) if causal else (got, {})
    wanted, end = naive_linear_attention_read(**tensors, **supports, **options, initial_state=memory or None)
    pairs = {name: (x, y) for name, x, y in zip(("mean", "free_energy"), read, wanted) if x is not None}
    if key_mask is not None:
        pairs = {name: (x * key_mask[..., None, None], y * key_mask[..., None, None]) for name, (x, y) in pairs.items()}
    pairs |= {f"last {name}": (last[name], end[name]) for name in last}

    floor = 1e-6 * (1 + tensors["v"].abs().max().item())
    for name, (x, y) in pairs.items():
        close(x, y, floor, name)
    weights = [torch.randn(y.shape, dtype=torch.float64) / y.shape[1] ** 0.5 for _, y in pairs.values()]
    ours, theirs = (
        torch.autograd.grad(
            sum((x * weight).sum() for x, weight in zip(side, weights)), list(leaves.values()), materialize_grads=True
        )
        for side in zip(*pairs.values())
    )
    for name, x, y in zip(leaves, ours, theirs):
        close(x, y, floor, f"d{name}")


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("time", [1, 2, 32, 67])
def test_reads_states_and_gradients_are_those_of_the_definition(time, decay):
    check(draw(decay, time=time, heads=1 + (time == 2)))


@pytest.mark.parametrize("decay", DECAYS[1:])
def test_any_width(decay):
    check(draw(decay, heads=1, dk=37, dv=35))


@pytest.mark.parametrize("decay", DECAYS[1:])
@pytest.mark.parametrize("span", [0.0, 80.0, 500.0])
def test_any_span_of_values_and_a_memory_to_start_from(span, decay):
    tensors = draw(decay, span=span or 2.0)
    tensors["v"] *= span > 0
    check(tensors, draw_memory(tensors))


@pytest.mark.parametrize("decay", DECAYS[1:])
@pytest.mark.parametrize("rate", [0.0, 2000.0 / 37, 1000.0])
def test_any_decay(rate, decay):
    check(draw(decay, rate=rate))


@pytest.mark.parametrize("decay", DECAYS[1:])
@pytest.mark.parametrize(("rate", "spike"), [(40.0, 500.0), (0.3, 300.0)])
def test_a_spike_that_has_decayed_away_starves_no_other_token(rate, spike, decay):
    fallbacks.reset()
    check(draw(decay, rate=rate, spike=spike))
    assert fallbacks.recomputed > 0


def test_ordinary_values_are_never_computed_again():
    fallbacks.reset()
    keyed_scan_read(**draw("channel", rate=5.0), backend="triton")
    assert fallbacks.recomputed == 0


@pytest.mark.parametrize("decay", DECAYS)
def test_masks_and_documents(decay):
    tensors = draw(decay, batch=2)
    mask, ids = torch.rand(2, 37) > 0.3, (torch.rand(2, 37) > 0.8).cumsum(1)
    mask[0, :5] = mask[1, -7:] = False
    check(tensors, draw_memory(tensors), key_mask=mask, segment_ids=ids)


@pytest.mark.parametrize("decay", DECAYS[1:])
def test_both_ways(decay):
    check(draw(decay, time=33), causal=False, key_mask=torch.rand(1, 33) > 0.2)


@pytest.mark.parametrize("decay", DECAYS[:2])
def test_the_mean_alone(decay):
    tensors = draw(decay, beta=False)
    check(tensors, draw_memory(tensors))


def test_heavy_weights():
    tensors = draw("head")
    memory = draw_memory(tensors)
    memory["log_weight"] += 50
    check(tensors, memory)


def test_rows_that_see_nothing_read_zero_without_gradient():
    tensors = draw("head", batch=2)
    tensors["q"][0, 5] = 0
    tensors["k"][1] = 0
    leaves = {name: x.requires_grad_() for name, x in tensors.items()}
    mean, free = keyed_scan_read(**leaves, backend="triton")
    for read in (mean, free):
        assert (read[0, 5] == 0).all()
        assert (read[1] == 0).all()
    grads = torch.autograd.grad(mean.sum() + free.sum(), list(leaves.values()))
    assert all(grad.isfinite().all() for grad in grads)
    assert (grads[0][1] == 0).all()
    assert (grads[2][1] == 0).all()


@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_a_number_that_is_none_is_read_as_none(where):
    tensors = draw("head", time=6)
    tensors[where][0, 3] = torch.nan
    terms, _ = linear_attention_terms(*tensors.values(), backend="triton")
    for part in terms[1:]:
        assert part[:, 3].isnan().all()


@pytest.mark.parametrize("decay", DECAYS[1:])
def test_future_tokens_change_nothing(decay):
    tensors = draw(decay, time=40)
    before = keyed_scan_read(**tensors, backend="triton")
    for name in "qkv":
        tensors[name][:, 20:] = torch.rand_like(tensors[name][:, 20:]) + 7
    after = keyed_scan_read(**tensors, backend="triton")
    for one, other in zip(before, after):
        assert torch.equal(one[:, :20], other[:, :20])


@pytest.mark.parametrize("decay", DECAYS[1:])
def test_a_sequence_in_parts_equals_the_whole(decay):
    tensors = draw(decay, time=40)
    whole, end = keyed_scan_read(**tensors, return_state=True, backend="triton")
    reads, state = [], None
    for start, stop in ((0, 1), (1, 20), (20, 40)):
        part = {n: x if n == "beta" or x is None else x[:, start:stop] for n, x in tensors.items()}
        read, state = keyed_scan_read(**part, initial_state=state, return_state=True, backend="triton")
        reads.append(read)
    for parts, wanted in zip(zip(*reads), whole):
        close(torch.cat(parts, 1), wanted, 1e-6, "read")
    for name, wanted in end.memory.items():
        close(state.memory[name], wanted, 1e-6, name)


def test_gradients_repeat_bit_by_bit():
    tensors = {name: x.requires_grad_() for name, x in draw("head", spike=300.0).items()}
    read = lambda: keyed_scan_read(**tensors, backend="triton").free_energy.square().sum()  # noqa: E731
    for one, other in zip(*(torch.autograd.grad(read(), list(tensors.values())) for _ in range(2))):
        assert torch.equal(one, other)


def test_a_backward_of_the_weight_alone():
    tensors = draw("channel", rate=1.0)
    sides = []
    for backend in ("triton", "plain"):
        leaves = {n: x.clone().requires_grad_() for n, x in tensors.items()}
        terms, _ = linear_attention_terms(*leaves.values(), backend=backend, present=False)
        weight = terms.log_weight[:, 1:].square().sum()
        sides.append(torch.autograd.grad(weight, list(leaves.values()), materialize_grads=True))
    for (name, _), one, other in zip(tensors.items(), *sides):
        close(one, other, 1e-6, f"d{name}")


def test_a_layer_reads_with_the_kernels():
    layers = []
    for backend in ("triton", "plain"):
        torch.manual_seed(1)
        layers.append(FreeEnergyMixer(FreeEnergyMixerConfig(n_embd=32, n_head=2, prior_type="gla", backend=backend)))
    x = torch.randn(1, 19, 32)
    ours, plain = (layer(x, attention_mask=torch.arange(19)[None] > 2) for layer in layers)
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)


def half_precision(monkeypatch):
    """bfloat16; for the interpreter, which has no such products, float32 with the tiles and rounded operands of it."""
    if not INTERPRETED:
        return torch.bfloat16
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    exact = InterpreterBuilder.create_dot
    rounded = lambda x: TensorHandle(torch.tensor(x.data, device="cpu").bfloat16().float().numpy(), x.dtype)  # noqa: E731
    product = lambda self, a, b, *rest: exact(self, rounded(a), rounded(b), *rest)  # noqa: E731
    monkeypatch.setattr(InterpreterBuilder, "create_dot", product)
    monkeypatch.setattr(
        linear_attention_triton, "blocks_for", lambda *sizes: blocks_for(*sizes[:3], half_precision=True)
    )
    return torch.float32


@pytest.mark.parametrize("decay", DECAYS[1:])
def test_half_precision_costs_the_rounding_of_products_alone(decay, monkeypatch):
    dtype = half_precision(monkeypatch)
    tensors = draw(decay, time=70, dk=16, dv=16, spike=20.5)
    tensors = {name: x if name in ("beta", "log_decay") else x.bfloat16().to(dtype) for name, x in tensors.items()}
    sides, weights = [], torch.randn(2, *tensors["v"].shape)
    for read in (lambda **x: keyed_scan_read(**x, backend="triton"), lambda **x: naive_linear_attention_read(**x)[0]):
        leaves = {name: x.clone().requires_grad_() for name, x in tensors.items()}
        reads = read(**leaves)
        loss = sum((x * weight).sum() for x, weight in zip(reads, weights))
        sides.append((reads, torch.autograd.grad(loss, list(leaves.values()))))
    (ours, grads), (exact, wanted) = sides
    assert (ours.mean - exact.mean).abs().max() <= 2**-8 * tensors["v"].abs().max()
    assert ((ours.free_energy - exact.free_energy) * tensors["beta"]).abs().max() <= 4 * 2**-8
    for name, got, want in zip(tensors, grads, wanted):
        assert (got - want).norm() <= 0.02 * want.norm(), name


def test_half_precision_comes_back_in_its_dtype():
    tensors = {name: x.bfloat16() for name, x in draw("head").items()}
    read, exact = keyed_scan_read(**tensors, backend="triton"), naive_linear_attention_read(**tensors)[0]
    for got, want in zip(read, exact):
        assert got.dtype == torch.bfloat16
        assert (got - want).abs().max() <= 2**-8 * want.abs().max()


def test_the_operators_keep_to_what_they_are_registered_as():
    q, k, v = (torch.rand(1, 5, 1, 4).requires_grad_() for _ in range(3))
    memory = torch.rand(1, 1, 4), torch.rand(1, 1, 4, 4), torch.rand(1, 1, 4, 4)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    for beta, g in ((torch.rand(1, 4), -torch.rand(1, 5, 1, 1)), (None, None)):
        start = memory if beta is not None else (*memory[:2], None)
        inputs = (q, k, v, beta, g, *start)
        opcheck(linear_attention_triton._forward, (*inputs, True), test_utils=checks)
        outputs = [x.detach() for x in linear_attention_triton._forward(*inputs, True)]
        grads = [torch.ones_like(x) for x in outputs[:6]]
        inputs = tuple(None if x is None else x.detach() for x in inputs)
        backward = (grads, *inputs, outputs[1], *outputs[6:], True)
        opcheck(linear_attention_triton._backward, backward, test_utils=("test_schema", "test_faketensor"))


def test_torch_counts_the_operations_that_it_counts_of_the_plain_form():
    tensors = draw("channel")
    read = lambda backend: lambda *x: keyed_scan_read(**dict(zip(tensors, x)), backend=backend)  # noqa: E731
    forward, backward = counted(read("triton"), *tensors.values())
    assert (forward, backward) == counted(read("plain"), *tensors.values())
    assert 0 < 2 * forward == backward


def test_what_the_kernels_cannot_read_is_named():
    with pytest.raises(ValueError, match="float64"):
        keyed_scan_read(**{n: None if x is None else x.double() for n, x in draw(None).items()}, backend="triton")
    with pytest.raises(ValueError, match="257"):
        keyed_scan_read(**draw(None, dk=257), backend="triton")
