"""Fused layers in Triton's interpreter against the plain form in float64: `test_fused.py` runs this file."""

from dataclasses import replace
from functools import partial
from itertools import product

import fused_on_cpu
import pytest
import torch
import triton.language as tl
from dispatched import watched
from layers import stirred
from torch.utils.checkpoint import checkpoint

from fem import PRIORS, FreeEnergyMixer, FreeEnergyMixerConfig, fused_layer, joint_maps
from fem.ops.common import joined, part_kernels, row_maps
from fem.ops.linear_attention import doubtful_tokens, fla_read, scan_kernels
from fem.ops.softmax.fused import bounded_attention
from fem.ops.softmax.fused import doubt_kernels as doubt
from fem.ops.softmax.fused import elementwise_kernels as kernels
from fem.priors import kv_cache

torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)  # fresh memory is NaN: what nobody wrote shows

KERNEL, PACK = fused_layer.attention_kernel, kv_cache.pack_exactly
PARTS_OFF = {"use_lse": False, "use_temperature": False, "use_outer_gate": False}
LAYERS = {
    "full": {},
    "slim": {"gate_rank": 4},
    "split": {"gate_rank": 4, "free_share": 0.5},
    "an odd split under full gates": {"free_share": 0.25},
    "grouped heads": {"n_kv_head": 1},
    "conditioner": {"use_conv": True},
    "slim, grouped, conditioner": {"use_conv": True, "gate_rank": 4, "n_kv_head": 1},
    "inner widths of two steps": {"use_conv": True, "conv_hidden": 72, "gate_rank": 68},
    "slim, conditioner, no biases, no rotation": {"use_conv": True, "gate_rank": 4, "bias": False, "use_rope": False},
    "attention, conditioner": PARTS_OFF | {"use_conv": True},
    "split, conditioner": {"use_conv": True, "free_share": 0.5},
    "attention": PARTS_OFF,
    "attention and the outer gate": {"use_lse": False, "use_temperature": False},
    "F alone": {"use_temperature": False, "use_outer_gate": False},
    "F alone, conditioner": {"use_temperature": False, "use_conv": True},
    "no outer gate": {"use_outer_gate": False},
    "both directions": {"causal": False},
    "both directions, conditioner": {"causal": False, "use_conv": True, "conv_bidirectional": True, "gate_rank": 4},
    "no rotation": {"use_rope": False},
    "no biases": {"bias": False},
}
LINEAR = {
    "gla": {},
    "linear": {"prior_type": "linear"},
    "gla, columns of no whole eights": {"n_head": 3, "fem_dim": 30, "qk_dim": 18},
    "gla, a decay of each channel": {"decay": "channel", "n_head": 3, "fem_dim": 30, "qk_dim": 18},
    "gla, one decay": {"decay": "scalar", "gate_rank": 4},
    "gla, slim": {"gate_rank": 4},
    "gla, split": {"free_share": 0.25},
    "linear, slim, split": {"prior_type": "linear", "gate_rank": 4, "free_share": 0.5},
    "gla, the mean alone": PARTS_OFF,
    "gla, F alone": {"use_temperature": False, "use_outer_gate": False},
    "gla, lambda at beta 1": {"use_temperature": False, "keep_lambda": True},
    "gla, no outer gate": {"use_outer_gate": False},
    "gla, conditioner": {"use_conv": True},
    "linear, slim, split, conditioner": {"prior_type": "linear", "gate_rank": 4, "free_share": 0.5, "use_conv": True},
    "gla, slim, no biases, no rotation": {"gate_rank": 4, "bias": False, "use_rope": False},
}
LAYERS |= {name: {"prior_type": "gla"} | fields for name, fields in LINEAR.items()}
WINDOWS = {"a window": {"window": 4}, "a window in both directions": {"window": 4, "causal": False, "n_kv_head": 1}}
LAYERS |= WINDOWS
VALUES = {"usual": (1.0, 0.0), "spikes of 300 nats": (1.0, 200.0), "nearly equal": (1e-3, 0.0), "offset": (1.0, 30.0)}
VALUES["far below 0"] = (1.0, -200.0)  # whose distance to the 0 of a token that is not there has no exponential


@pytest.fixture(autouse=True)
def fused(monkeypatch):
    fused_on_cpu.install(monkeypatch)


def build(fields, width=12, heads=2, **sizes):
    torch.manual_seed(0)
    usual = {"n_embd": 20, "n_head": heads, "fem_dim": width * heads, "qk_dim": 8 * heads, "use_conv": False}
    return stirred(FreeEnergyMixer(FreeEnergyMixerConfig(**usual | sizes | fields)))


def exact(layer):
    """The same layer by the plain form in float64."""
    twin = FreeEnergyMixer(replace(layer.config, backend="plain")).double()
    twin.load_state_dict(layer.state_dict())
    return twin


def trained(layer, x, gradient, parameters=None, **marks):
    x, parameters = x.detach().requires_grad_(), layer.parameters() if parameters is None else parameters
    y = layer(x, **marks)
    return [y, *torch.autograd.grad(y, [x, *parameters], gradient.to(y.dtype), materialize_grads=True)]


def assert_near(found, wanted, within, gradient):
    """By the norm of the output and of each gradient; of what is but rounding, by that of the output's gradient."""
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).norm() < within * other.norm().clamp_min(1e-2 * gradient.norm())


def errors(layer, x):
    """Of the output and of each gradient, relative to its norm; of what is but rounding, to the output's gradient.
    Infinite where a number is NaN."""
    torch.manual_seed(1)  # one gradient for all forms of a layer
    gradient = torch.randn(x.shape)
    wanted = trained(exact(layer), x.double(), gradient)
    names = ["output", "x", *(name for name, _ in layer.named_parameters())]
    found = trained(layer, x, gradient)
    least = 1e-2 * gradient.norm()
    relative = [(a - b).norm() / b.norm().clamp_min(least) for a, b in zip(found, wanted, strict=True)]
    return {name: error.nan_to_num(torch.inf).item() for name, error in zip(names, relative, strict=True)}


def spread(layer, scale, spike):
    """Give the values this scale and, in every fifth channel, an offset or, where large, a few tokens this spike."""
    with torch.no_grad():
        layer.value.weight.mul_(scale)
        layer.value.bias.mul_(scale)
        if spike < 100:
            layer.value.bias.add_(spike)
        else:
            layer.value.weight[::5].mul_(spike)


@pytest.mark.parametrize("name", LAYERS)
def test_outputs_and_gradients_are_those_of_the_definition(name, monkeypatch):
    """Of linear attention by the fused form alone, as nothing is in doubt: the read of the prior is out of order."""
    layer = build(LAYERS[name])
    if name in LINEAR:
        monkeypatch.setattr(layer.prior, "read", None)
    found = errors(layer, torch.randn(2, 19, 20))
    assert max(found.values()) < 2e-5, found


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("name", ["full", "slim, grouped, conditioner", "split", "split, conditioner", "gla"])
def test_values_of_any_span_are_read_exactly(name, values):
    layer = build(LAYERS[name])
    spread(layer, *VALUES[values])
    found = errors(layer, torch.randn(2, 19, 20))
    assert max(found.values()) < (2e-3 if values in ("nearly equal", "offset", "far below 0") else 5e-5), found


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("name", ["full", "slim, grouped, conditioner", "gla", "linear, slim, split, conditioner",
                                  "both directions", "both directions, conditioner", *WINDOWS])  # fmt: skip
def test_masking_a_token_equals_deleting_it(name, documents, monkeypatch):
    layer, ids = build(LAYERS[name]), torch.arange(19).expand(4, -1) // 8
    assert_masked_tokens_are_passed_over(layer, monkeypatch, **{"segment_ids": ids} if documents else {})


def assert_masked_tokens_are_passed_over(layer, monkeypatch, **marks):
    """In rows padded on the left, on the right, with a hole, and of masked tokens alone; NaN stands in these."""
    x, keep = torch.randn(4, 19, 20), torch.ones(4, 19, dtype=torch.bool)
    keep[0, :5] = keep[1, 12:] = keep[2, 7:9] = keep[3] = False
    gradient, marks = torch.randn(4, 19, 20) * keep[..., None], marks | {"attention_mask": keep}
    wanted = trained(exact(layer), x.double(), gradient, **marks)
    monkeypatch.setattr(layer.prior, "read", None)
    found = trained(layer, x.masked_fill(~keep[..., None], torch.nan), gradient, **marks)
    wanted[0], found[0] = (y.masked_fill(~keep[..., None], 0) for y in (wanted[0], found[0]))
    assert_near(found, wanted, 2e-5, gradient)


@pytest.mark.parametrize("name, documents, spike", [
    ("a window", False, 200.0),
    ("a window in both directions", True, 0.0),
    ("full", True, 0.0),
    ("slim, grouped, conditioner", True, 200.0),
    ("both directions", True, 200.0),
    ("gla", True, 0.0),
    ("gla", True, 200.0),
    ("gla, a decay of each channel", True, 200.0),
    ("linear, slim, split, conditioner", True, 200.0),
])  # fmt: skip
def test_a_token_sees_its_document_and_window_alone(name, documents, spike, monkeypatch):
    """By the kernels, and where a value is in doubt."""
    layer, x, gradient = build(LAYERS[name]), torch.randn(2, 19, 20), torch.randn(2, 19, 20)
    ids = torch.tensor([[0] * 5 + [1] * 14, [0] * 1 + [1] * 12 + [2] * 6]) if documents else None
    if spike:
        spread(layer, 1.0, spike)
    wanted = trained(exact(layer), x.double(), gradient, segment_ids=ids)
    calls = watched(monkeypatch, fused_layer, "mixed")
    found = trained(layer, x, gradient, segment_ids=ids)
    assert calls[0][-1] is not None
    doubled = spike and name in ("gla", "slim, grouped, conditioner")  # 200 nats, and e^-88 of a card, are off by 1e-5
    assert_near(found, wanted, 1e-4 if doubled else 5e-5, gradient)


@pytest.mark.parametrize("miscompiled", [False, True])
@pytest.mark.parametrize("name", ["gla", "gla, a decay of each channel", "linear, slim, split, conditioner"])
def test_documents_of_a_few_tokens_are_told_apart(name, miscompiled, monkeypatch):
    """By decays to 0, some twenty in each of three chunks, in which they are added up."""
    layer, x, gradient = build(LAYERS[name]), torch.randn(1, 131, 20), torch.randn(1, 131, 20)
    ids = torch.randint(1, 7, (1, 131)).cumsum(1).div(10, rounding_mode="floor")
    wanted = trained(exact(layer), x.double(), gradient, segment_ids=ids)
    monkeypatch.setattr(fla_read, "miscompiled", lambda device: miscompiled)
    monkeypatch.setattr(layer.prior, "read", None)
    assert_near(trained(layer, x, gradient, segment_ids=ids), wanted, 1e-4, gradient)


SOFTMAX_PROMPTS = ["full", "split, conditioner", "F alone", "grouped heads", "attention"]
BOUNDED_PROMPTS = ["full", "split, conditioner", "slim, grouped, conditioner"]
LINEAR_PROMPTS = ["gla", "gla, a decay of each channel", "linear, slim, split, conditioner", "gla, the mean alone"]
LINEAR_PROMPTS += ["gla, F alone"]


@pytest.mark.parametrize("name, padded, documents, doubt", [
    *product(SOFTMAX_PROMPTS, [False, True], [False], [False]),
    *product(BOUNDED_PROMPTS, [False, True], [True], [False]),
    *product(["a window"], [False, True], [False, True], [False]),
    *product(LINEAR_PROMPTS, [False, True], [False, True], [True]),
    *product(["gla"], [False, True], [False, True], [False]),
])  # fmt: skip
def test_tokens_go_on_from_a_fused_prefill(name, padded, documents, doubt, monkeypatch):
    """Padded on the left, and with a hole; NaN stands in masked tokens. Also where sums prove nothing."""
    layer, x, keep = build(LAYERS[name]), torch.randn(2, 19, 20), torch.ones(2, 19, dtype=torch.bool)
    ids = torch.arange(19).ge(7).long().expand(2, -1)
    if padded:
        keep[0, :4] = keep[1, 3:5] = False
    if doubt:
        monkeypatch.setattr(scan_kernels, "LEAST_PROVEN", tl.constexpr(1e30))
    marks = ({"attention_mask": keep} if padded else {}) | ({"segment_ids": ids} if documents else {})
    part = lambda first, end: {mark: one[:, first:end] for mark, one in marks.items()}  # noqa: E731
    with torch.no_grad():
        wanted = exact(layer)(x.double(), **marks)
        x = x.masked_fill(~keep[..., None], torch.nan)
        with monkeypatch.context() as fused_alone:
            fused_alone.setattr(layer.prior, "read", None)
            y, state = layer(x[:, :12], return_state=True, **part(0, 12))
            if layer.prior.name != "softmax":  # which others read
                fused_alone.undo()
            z, state = layer(x[:, 12:18], state=state, return_state=True, **part(12, 18))
        last, _ = layer(x[:, 18:], state=state, return_state=True, **part(18, 19))
    assert (torch.cat([y, z, last], 1) - wanted)[keep].norm() < 1e-5 * wanted[keep].norm()


@torch.no_grad()
def test_the_state_of_a_cpu_is_read_as_a_cpu_packed_it(monkeypatch):
    layer, x = build({}), torch.randn(2, 19, 20)
    monkeypatch.setattr(kv_cache, "pack_exactly", PACK)
    y, state = layer(x[:, :12], return_state=True)
    z, _ = layer(x[:, 12:], state=state, return_state=True)
    torch.testing.assert_close(torch.cat([y, z], 1).double(), exact(layer)(x.double()), atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_maps_are_joined_and_their_gradients_taken_apart(dtype, monkeypatch):
    """As graphs do it, by operations of PyTorch: maps of fewer inputs, without a bias or a gradient, and casts."""
    weights = [torch.randn(rows, inputs) for rows, inputs in ((5, 7), (4, 5), (3, 7))]
    biases, others = [torch.randn(5), None, torch.randn(3)], [None, torch.randn(6, 2), torch.randn(9)]
    leaves = [y.requires_grad_() for y in (weights[0], weights[1], biases[0], biases[2], *others[1:])]
    found = []
    for compiling in (False, True):
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda answer=compiling: answer)
        weight, bias, cast = joined.joined(torch.empty(2, 3, 7, dtype=dtype), weights, biases, others)
        parts = [y for y in (weight, bias, *cast) if y is not None]
        torch.manual_seed(1)
        gradients = torch.autograd.grad(parts, leaves, [torch.randn(y.shape).to(y.dtype) for y in parts])
        found.append([*parts, *gradients])
    assert all(map(torch.equal, *found))
    assert {y.dtype for y in found[0][:4]} == {dtype}


def test_parts_of_any_number_are_summed():
    parts = torch.randn(130, 3, 7)
    torch.testing.assert_close(part_kernels.summed(parts, torch.float32), parts.sum(0))


@pytest.mark.parametrize("prior, time", [("softmax", 2), ("softmax", 67), ("gla", 67)])
def test_sequences_of_any_length_over_several_tiles(prior, time):
    layer = build({"prior_type": prior}, width=40, heads=1)  # 32 tokens a tile
    spread(layer, 1.0, 200.0)
    found = errors(layer, torch.randn(1, time, 20))
    near = found.pop("prior.key.bias")  # nearly 0: where rotation turns no key, this gradient is
    assert max(found.values()) < 5e-5, found
    assert near < 1e-3


@pytest.mark.parametrize("name", ["slim", "a window", "gla", "linear, slim, split, conditioner"])
def test_a_checkpointed_layer_is_computed_twice(name):
    layer, x, gradient = build(LAYERS[name]), torch.randn(2, 19, 20), torch.randn(2, 19, 20)
    wanted, calls, once = trained(layer, x, gradient), [], layer.forward

    def counted(x):
        calls.append(1)
        return once(x)

    layer.forward = partial(checkpoint, counted, use_reentrant=False)
    assert all(map(torch.equal, trained(layer, x, gradient), wanted))
    assert len(calls) == 2


@pytest.mark.parametrize("name", ["a window", "gla"])
def test_copies_of_what_is_kept_train_as_well(name):
    """As hooks give them that offload; the graph of another library's kernel is not copied."""
    layer, x, gradient = build(LAYERS[name]), torch.randn(2, 19, 20), torch.randn(2, 19, 20)
    wanted = trained(layer, x, gradient)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda kept: kept):
        assert all(map(torch.equal, trained(layer, x, gradient), wanted))


@pytest.mark.parametrize("name, spike", [("grouped heads", 200.0), ("gla", 1.0)])
def test_gradients_repeat_bit_for_bit(name, spike):
    layer, x = build(LAYERS[name]), torch.randn(2, 19, 20)
    spread(layer, 1.0, spike)
    once, again = (trained(layer, x, torch.ones_like(x)) for _ in range(2))
    torch.testing.assert_close(once, again, rtol=0, atol=0)


@pytest.mark.parametrize("name, values", [
    *product(["full", "gla"], ["usual", "spikes of 300 nats", "nearly equal"]),
    *product(["slim", "slim, conditioner", "gla, conditioner", "gla, a decay of each channel", "linear"], ["usual"]),
    ("gla, slim", "spikes of 300 nats"),
])  # fmt: skip
def test_bfloat16_errs_no_more_than_the_form_of_torch_operations(name, values, monkeypatch):
    """Both read the same rounded layer; the fused form's errors are at most 1.3 of the other's. Linear attention has
    kernels in both."""
    fields = LAYERS["slim"] | {"use_conv": True} if name == "slim, conditioner" else LAYERS[name]
    layer = build(fields | ({"backend": "triton"} if name in LINEAR else {}), width=16)
    spread(layer, *VALUES[values])
    layer, x = layer.bfloat16(), torch.randn(2, 40, 20).bfloat16()
    fused_on_cpu.install(monkeypatch, torch.bfloat16)
    with monkeypatch.context() as without:
        without.setattr(fused_layer, "available", lambda x: False)
        other = errors(layer, x)
    found = errors(layer, x)
    above = {name: (found[name], other[name]) for name in found if found[name] > max(1.3 * other[name], 2.5e-2)}
    assert not above, above


@pytest.mark.parametrize("name, documents, spike", [
    ("split, conditioner", False, 0.0),
    ("slim, grouped, conditioner", True, 200.0),
    ("a window in both directions", False, 0.0),
    ("gla", False, 0.0),
    ("linear, slim, split, conditioner", True, 0.0),
    ("gla, conditioner", True, 200.0),
])  # fmt: skip
def test_one_graph_without_a_break(name, documents, spike, monkeypatch):
    """Also where values are in doubt, in documents and under a window."""
    torch._dynamo.reset()  # of each layer two graphs are made, and of one function at most eight
    layer, x = build(LAYERS[name]), torch.randn(2, 11, 20)
    ids = torch.tensor([[0] * 5 + [1] * 6, [0] * 1 + [1] * 7 + [2] * 3]) if documents else None
    spread(layer, 1.0, spike)
    monkeypatch.setattr(type(layer.prior), "read", None)
    wanted = trained(layer, x, torch.ones_like(x), segment_ids=ids)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with torch.inference_mode():
        torch.testing.assert_close(compiled(x, segment_ids=ids), wanted[0])
    for keeps in (True, False):  # nothing of others' kernels, which run again in the backward
        monkeypatch.setattr("fem.ops.common.own_backward.keeps_graphs", lambda device, answer=keeps: answer)
        torch.testing.assert_close(trained(compiled, x, torch.ones_like(x), segment_ids=ids), wanted)


@pytest.mark.parametrize("how_many", ["some", "all"])
@pytest.mark.parametrize("name", LINEAR)
def test_tokens_of_linear_attention_in_doubt_are_read_again(name, how_many, monkeypatch):
    """A token is in doubt where its sums are below such a share of what one key would weigh."""
    layer, share = build(LAYERS[name]), 1.0 if name == "gla, the mean alone" else 0.01
    monkeypatch.setattr(layer.prior, "read", None)
    monkeypatch.setattr(doubtful_tokens, "SPAN", 4)
    monkeypatch.setattr(scan_kernels, "LEAST_PROVEN", tl.constexpr(share if how_many == "some" else 1e30))
    calls = watched(monkeypatch, fla_read, "read_doubtful")
    off = errors(layer, torch.randn(1, 19, 20))
    (_, scan, *_), *_ = calls[0]
    marks = scan.doubtful
    assert marks.all() if how_many == "all" else marks.any() and not marks.all()
    assert max(off.values()) < 2e-5, off


@pytest.mark.parametrize("doubt", [False, True])
def test_channels_decay_by_any_amount(doubt, monkeypatch):
    """From nothing to 125 nats a token."""
    layer = build(LAYERS["gla, a decay of each channel"])
    with torch.no_grad():
        layer.prior.decay.bias.copy_(torch.linspace(-2000.0, 200.0, 18)[torch.randperm(18)])
    monkeypatch.setattr(layer.prior, "read", None)
    if doubt:
        monkeypatch.setattr(scan_kernels, "LEAST_PROVEN", tl.constexpr(1e30))
    off = errors(layer, torch.randn(2, 19, 20))
    assert max(off.values()) < 2e-5, off


@pytest.mark.parametrize("name, dtype", [("gla", torch.float32), ("gla", torch.bfloat16), ("linear", torch.bfloat16)])
@pytest.mark.parametrize("doubt", [False, True])
def test_other_kernels_read_what_triton_miscompiles(name, dtype, doubt, monkeypatch):
    """A head's decay is given for each key channel; without one, products are of float32. Also as one graph."""
    layer, x = build(LAYERS[name]).to(dtype), torch.randn(*((1, 7) if doubt else (2, 19)), 20).to(dtype)
    fused_on_cpu.install(monkeypatch, dtype)
    monkeypatch.setattr(layer.prior, "read", None)
    if doubt:
        monkeypatch.setattr(scan_kernels, "LEAST_PROVEN", tl.constexpr(1e30))
    usual, wanted = errors(layer, x), trained(layer, x, torch.ones_like(x))
    monkeypatch.setattr(fla_read, "miscompiled", lambda device: True)
    off = errors(layer, x)
    assert all(error < max(2e-5, 1.3 * usual[part]) for part, error in off.items()), (off, usual)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    near = 1e-5 if dtype == torch.float32 else 5e-2
    for one, other in zip(trained(compiled, x, torch.ones_like(x)), wanted, strict=True):
        assert (one - other).norm() <= near * other.norm()


def test_keys_of_odd_widths_are_left_to_others():
    """The kernel that turns queries and keys takes them by pairs."""
    assert [KERNEL(0, 2, 2, width, 12, 12, True, True) for width in (8, 7)] == [(False, False), None]


def test_angles_that_a_captured_graph_may_read_are_kept(monkeypatch):
    angles = partial(fused_layer._shared_tables, build({}).prior)
    first, _ = angles(torch.empty(1, 5, 20)), angles(torch.empty(1, 40, 20))
    assert angles(torch.empty(1, 6, 20))[0] is first[0]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    inside = angles(torch.empty(1, 300, 20))
    assert angles(torch.empty(1, 300, 20))[0] is not inside[0]


class OnCard(torch.Tensor):
    is_cuda = True


def test_a_captured_graph_reads_its_mask_itself(monkeypatch):
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool).tril().as_subclass(OnCard)
    known = bounded_attention.seen_of(mask, True)
    assert bounded_attention.seen_of(mask, True) is known
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert bounded_attention.seen_of(mask, True) is not known


@pytest.mark.parametrize("name", ["full", "slim", "split", "gla", "linear, slim, split"])
def test_the_smallest_temperatures_have_gradients(name):
    layer = build(LAYERS[name])
    with torch.no_grad():
        layer.beta.theta.fill_(-80.0)
    found = errors(layer, torch.randn(1, 9, 20))
    rounding = {"beta.theta", "gate.inner.weight", "gate.inner.down.weight"}  # of F - m, which is 0 there
    assert all(error < (5e-5 if name in rounding else 2e-5) for name, error in found.items()), found


@pytest.mark.parametrize("name", ["full", "gla"])
def test_a_second_derivative_is_refused(name):
    layer, x = build(LAYERS[name]), torch.randn(1, 5, 20, requires_grad=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(layer(x).sum(), x, create_graph=True)


TOKENS = {prior: {"prior_type": prior, "qk_dim": None} for prior in PRIORS} | {
    "slim": {"gate_rank": 4},
    "slim, conditioner": {"gate_rank": 4, "use_conv": True, "n_kv_head": 1},
    "slim gates of rank 17": {"gate_rank": 17},
    "a gate of each head": {"gate_rank": 0, "use_temperature": False},
    "attention": PARTS_OFF,
}


def counted(monkeypatch) -> list[tuple]:
    """Let float32 layers on a CPU take the maps of a token, of which each launch is listed."""
    monkeypatch.setattr(joint_maps, "DTYPES", (torch.float32,))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    return watched(monkeypatch, row_maps, "row_maps")


@pytest.mark.parametrize("name", TOKENS)
@torch.no_grad()
def test_the_maps_of_one_token_are_one_launch(name, monkeypatch):
    layer, x = build(TOKENS[name]), torch.randn(3, 20, 9).mT  # whose features do not lie side by side
    wanted = exact(layer)(x.double())[:, 8:]
    _, state = layer(x[:, :8], return_state=True)
    launches = counted(monkeypatch)
    y, _ = layer(x[:, 8:], state=state, return_state=True)
    assert len(launches) == 1
    assert (y - wanted).norm() < 2e-5 * wanted.norm()


ROWS = TOKENS | {
    "mamba, slim, conditioner": TOKENS["mamba"] | {"gate_rank": 17, "use_conv": True},
    "mamba by its kernels": TOKENS["mamba"] | {"backend": "triton"},
    "channels, split, no biases": TOKENS["rnn_decay"] | {"free_share": 0.5, "bias": False, "use_conv": True},
}


@pytest.mark.parametrize("name", ROWS)
def test_the_maps_of_a_row_are_one_product(name, monkeypatch):
    layer, products, product = build(ROWS[name]), [], joint_maps._of_a_row
    monkeypatch.setattr(fused_layer, "mixed", lambda *call: None)
    monkeypatch.setattr(joint_maps, "DTYPES", (torch.float32,))
    monkeypatch.setattr(joint_maps, "_of_a_row", lambda *given: products.append(1) or product(*given))
    x = torch.randn(2, 9, 20)
    found = errors(layer, x)
    assert max(found.values()) < 2e-5, found
    assert len(products) == 1
    torch._dynamo.reset()
    graph = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(*(trained(one, x, torch.ones_like(x)) for one in (graph, layer)), rtol=1e-5, atol=1e-5)
    assert len(products) == 3
    with torch.no_grad():  # whose graph reads each weight where it lies
        torch.testing.assert_close(graph(x), layer(x), rtol=1e-5, atol=1e-5)
    assert len(products) == 4


def hooked(layer):
    layer.value.register_forward_hook(lambda *inputs: None)


def adapted(layer):
    layer.prior.query = torch.nn.Sequential(layer.prior.query)


PLAIN = {"a hook": (hooked, 2, 1), "an adapter": (adapted, 2, 1), "rows": (lambda layer: None, 65, 1),
         "float64": (lambda layer: layer.double(), 2, 1)}  # fmt: skip


@pytest.mark.parametrize("why", PLAIN)
def test_one_token_has_maps_of_its_own_only_where_they_are_plain(why, monkeypatch):
    (change, rows, time), layer = PLAIN[why], build({})
    counted(monkeypatch)
    x = torch.randn(rows, time, 20)
    assert joint_maps.columns(layer, x[:2, :1]) is None  # under gradients
    with torch.no_grad():
        assert joint_maps.columns(layer, x[:2, :1]) is not None
        with monkeypatch.context() as eager:
            eager.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
            assert joint_maps.columns(layer, x[:2, :1]) is None
        change(layer)
        assert joint_maps.columns(layer, x.to(layer.output.weight.dtype)) is None


class Nothing:
    """In a kernel's place: it leaves what it should write as it is."""

    def __getitem__(self, grid):
        return lambda *arguments, **sizes: None


KERNELS = {  # and where they stand
    **{name: doubt for name in vars(doubt) if name.startswith("doubtful_")},
    **{name: kernels for name in vars(kernels) if name.endswith("_kernel")},
    "join_maps_kernel": joined,
    "sum_parts_kernel": part_kernels,
}


@pytest.mark.parametrize("name", KERNELS)
def test_no_kernel_is_idle_where_values_spike(name, monkeypatch):
    """Without it the errors are larger than the tests above allow."""
    module, layer = KERNELS[name], build(LAYERS["slim, grouped, conditioner"])
    spread(layer, 1.0, 200.0)
    monkeypatch.setattr(module, name, Nothing())
    found = torch.tensor(list(errors(layer, torch.randn(2, 19, 20)).values()))
    assert not found.max() < 5e-5  # NaN too
