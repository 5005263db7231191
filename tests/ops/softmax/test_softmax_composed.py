"""The GPU's path, as far as a CPU runs it: attention over [v | e], and FlexAttention forward."""

import math
import warnings
from types import SimpleNamespace

import pytest
import torch
from dispatched import Dispatched, watched
from processes import printed
from reads import gradients_of, make

from fem import FreeEnergyMixer, FreeEnergyMixerConfig
from fem.functional import softmax_read
from fem.ops.common.precision import fallbacks
from fem.ops.common.tokens import read_tokens
from fem.ops.softmax import card_attention as card
from fem.ops.softmax import composed_read, exact
from fem.ops.softmax.softmax_read import without_masked
from fem.ops.softmax.support import Support, bounds, support
from fem.priors import softmax as prior

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def draw(time, queries=None, heads=4, key_heads=2, batch=2, key=16, value=8):
    q, k = torch.randn(batch, queries or time, heads, key), torch.randn(batch, time, key_heads, key)
    return q, k, torch.randn(batch, time, key_heads, value), torch.rand(key_heads, value) + 0.5


def definition(*arguments, **rules):
    """The reads in float64, by the definition."""
    leaves = [x.detach().double().requires_grad_() for x in arguments]
    return softmax_read(*leaves, backend="reference", **rules), leaves


def composed(q, k, v, beta, *, causal=True, window=None, key_mask=None, segment_ids=None, bias=None, by_blocks=True):
    tokens = None
    if key_mask is not None or segment_ids is not None:
        tokens, _ = read_tokens(tuple(k.shape[:2]), k.device, key_mask, segment_ids)
    rules = support(q.shape[1], k.shape[1], q.device, causal, q.shape[-1] ** -0.5, window, bias, tokens)
    if by_blocks and rules.first is None:
        first, end = bounds(rules, q.shape[1], k.shape[1], q.device)
        rules = rules._replace(first=first, end=end)
    k, v = (x if rules.keep is None else without_masked(x, rules.keep.expand(len(x), -1)) for x in (k, v))
    return composed_read.composed_read(q, k, v, v, beta, rules)


def spiked(v, beta, case):
    kind, _, size = case.partition(" ")
    if kind == "span":
        return torch.rand_like(v) * float(size) / beta
    if kind == "spike":
        v = v.clone()
        v[:, v.shape[1] // 2] += float(size)
    return v + float(size) if kind == "offset" else v * float(size) if kind == "times" else v


@pytest.mark.parametrize("time", [1, 7, 131])
@pytest.mark.parametrize(
    "case", ["normal", "span 50", "span 500", "spike 80", "spike 300", "offset 1000", "times 0.01"]
)
def test_reads_and_gradients_equal_the_definition(time, case):
    """Where attention cannot prove an entry, it is computed again."""
    q, k, v, beta = draw(time)
    v = spiked(v, beta, case)
    leaves = [x.requires_grad_() for x in (q, k, v, beta)]
    fallbacks.reset()
    read = composed(*leaves, by_blocks=False)
    assert fallbacks.recomputed > 0 or case != "spike 300" or time < 2
    wanted, exact = definition(*leaves)
    weights = torch.randn(2, *read.mean.shape)
    torch.autograd.backward(list(read), list(weights))
    torch.autograd.backward(list(wanted), list(weights.double()))
    largest = 1 + v.detach().abs().max()
    assert (read.mean - wanted.mean).abs().max() <= 2e-6 * largest
    assert (read.free_energy - wanted.free_energy).abs().max() <= 1e-5 * largest
    for own, other in zip(leaves, exact):
        assert (own.grad - other.grad).abs().max() <= 2e-6 * largest + 2e-5 * (1 + other.grad.abs().max())


RULES = {
    "causal": {},
    "full": {"causal": False},
    "window": {"window": 5},
    "window both ways": {"window": 5, "causal": False},
    "documents": {"segment_ids": torch.arange(150).expand(2, -1) // 37},
    "padding": {"key_mask": (torch.arange(150) >= torch.tensor([[40], [0]])).long()},
    "padding and documents": {
        "key_mask": (torch.arange(150) >= torch.tensor([[40], [3]])).long(),
        "segment_ids": torch.arange(150).expand(2, -1) // 50,
        "window": 20,
    },
    "bias of a key": {"bias": torch.randn(1, 4, 1, 150)},
    "bias of a pair": {"bias": torch.randn(2, 1, 150, 150)},
    "padding and a bias": {
        "key_mask": (torch.arange(150) % 7 > 0).long().expand(2, -1),
        "bias": torch.randn(1, 4, 150, 150),
    },
}


@pytest.mark.parametrize("flexible", [True, False])
@pytest.mark.parametrize("rule", RULES)
@torch.no_grad()
def test_flex_attention_sees_what_a_row_may_see(rule, flexible, monkeypatch):
    """And so does attention under a table, on cards where FlexAttention does not run."""
    monkeypatch.setattr(composed_read, "widest_flexible", lambda device: math.inf if flexible else 0.0)
    arguments, rules = draw(150), RULES[rule]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        read = composed(*arguments, **rules)
    wanted, _ = definition(*arguments, **rules)
    kept = torch.ones(2, 150, dtype=torch.bool) if "key_mask" not in rules else rules["key_mask"].bool()
    torch.testing.assert_close([x[kept].double() for x in read], [x[kept] for x in wanted], rtol=1e-5, atol=2e-6)


def test_a_card_that_does_not_multiply_bfloat16_reads_16_bits_in_float32(monkeypatch):
    for name in ("multiplies_bfloat16", "widest_flexible"):
        monkeypatch.setattr(composed_read, name, lambda device: 0)
    leaves = [x.half().requires_grad_() for x in draw(40)]
    read, (wanted, exact) = composed(*leaves, window=9), definition(*leaves, window=9)
    sum(part.float().square().sum() for part in read).backward()
    sum(part.square().sum() for part in wanted).backward()
    for own, other in zip([*read, *(x.grad for x in leaves)], [*wanted, *(x.grad for x in exact)]):
        assert (own - other).abs().max() <= 4e-3 * (1 + other.abs().max())


@torch.no_grad()
def test_blocks_hold_every_key_that_a_row_sees_and_whole_ones_no_other():
    cpu, tile = torch.device("cpu"), card._TILE
    tokens, _ = read_tokens((2, 700), cpu, None, torch.arange(700).expand(2, -1) // 300)
    rules = support(700, 700, cpu, True, 1.0, 200, None, tokens)
    mask = card.block_mask(rules, 700, 700, card.block_lists(rules, 700, 700, cpu))
    allowed = rules.visible(700, 700, cpu)[:, 0]
    for b in range(2):
        for row in range(-(-700 // tile)):
            count, full = mask.kv_num_blocks[b, 0, row], mask.full_kv_num_blocks[b, 0, row]
            some, whole = mask.kv_indices[b, 0, row, :count], mask.full_kv_indices[b, 0, row, :full]
            for block in range(-(-700 // tile)):
                own = allowed[b, row * tile : (row + 1) * tile, block * tile : (block + 1) * tile]
                assert (block in whole) == bool(own.all() and own.shape[1] == tile)
                assert (block in some) or (block in whole) or not own.any()
    for name in ("kv_num_blocks", "kv_indices", "q_num_blocks", "q_indices"):  # kernels go through them by adding 1
        assert getattr(mask, name).is_contiguous()
        assert getattr(mask, f"full_{name}").is_contiguous()


BFLOAT16 = {"usual": {}, "span 50": {"spread": 10.0}, "span 200": {"spread": 40.0}, "beta": {"beta": 0.01}}


@pytest.mark.parametrize("case", [*BFLOAT16, "spike", "scores"])
def test_bfloat16_loses_at_most_twice_what_the_plain_form_loses(case):
    size = 100.0 if case == "scores" else 4.0
    call = make("softmax", 127, **BFLOAT16.get(case, {}), weights=size, dtype=torch.bfloat16)
    call.arguments["v"][:, 63] += 500 * (case == "spike")
    cotangents, found = [torch.randn(1, 127, 2, 3) for _ in range(2)], []
    by_kernel = lambda call: composed(*(call.arguments[n] for n in ("q", "k", "v", "beta")), by_blocks=False)  # noqa: E731
    forms = (torch.float64, type(call).definition), (torch.bfloat16, by_kernel), (torch.bfloat16, type(call).definition)
    for dtype, form in forms:
        mine = call.leaves(dtype)
        read = form(mine)
        found.append([*read, *gradients_of(mine, read, cotangents).values()])
    unit = 16 * torch.finfo(torch.bfloat16).eps * (1 + call.arguments["v"].abs().max())
    assert found[1][1].dtype == torch.float32
    for place, (want, own, plain) in enumerate(zip(*found)):
        error, allowed = ((x.double() - want).abs().max() for x in (own, plain))
        assert error <= max(2 * allowed, unit) * (16 if place == 5 else 1)  # dbeta, of nearly equal sums


@pytest.mark.parametrize("spike", [0.0, 300.0])
def test_no_tensor_is_quadratic_in_the_tokens_forward_or_backward(monkeypatch, spike):
    monkeypatch.setattr(exact, "_NUMBERS", 1 << 13)
    leaves = draw(512, heads=2, key_heads=1, batch=1)
    leaves[2][:, 200, :, 0] += spike
    fallbacks.reset()
    with Dispatched() as seen:
        read = composed(*(x.requires_grad_() for x in leaves), by_blocks=False)
        (read.mean.sum() + read.free_energy.sum()).backward()
    assert (fallbacks.recomputed > 0) == (spike > 0)
    largest = max(x.numel() for _, _, made in seen.calls for x in made)
    assert largest <= 512 * 2 * 16  # of q; a matrix of pairs has 512 * 512


HALF, SINGLE = torch.float16, torch.float32


@pytest.mark.parametrize(("dtype", "inside", "groups"), [
    (HALF, torch.bfloat16, True), (SINGLE, SINGLE, False), (torch.bfloat16, torch.bfloat16, True),
])  # fmt: skip
@pytest.mark.parametrize(("key", "value"), [(16, 8), (24, 7), (8, 20)])
def test_attention_is_asked_for_what_fused_kernels_have(monkeypatch, dtype, inside, groups, key, value):
    asked = watched(monkeypatch, torch.nn.functional, "scaled_dot_product_attention")
    q, k, v, beta = draw(21, key=key, value=value)
    read = composed(q.to(dtype), k.to(dtype), v.to(dtype), beta, by_blocks=False)
    (((q, k, v), how, _),) = asked
    assert q.dtype == k.dtype == v.dtype == inside
    assert q.shape[-1] == k.shape[-1] == v.shape[-1]
    assert q.shape[-1] % 16 == 0
    assert how["enable_gqa"] == groups
    assert (q.shape[1] != k.shape[1]) == groups
    assert read.mean.shape[-1] == value


CUDA, ROCM = "shared_memory_per_block_optin", "shared_memory_per_block"


@pytest.mark.parametrize(
    "name, columns, kib, score, block, stages",
    [
        (CUDA, 128, 99, None, None, None),
        (CUDA, 192, 99, None, 32, None),
        (CUDA, 192, 163, None, None, None),
        (CUDA, 192, 99, torch.add, 32, 1),
        (ROCM, 192, 64, None, 32, None),
    ],
)
def test_flex_attention_is_compiled_for_any_length_in_blocks_that_fit_the_card(
    monkeypatch, name, columns, kib, score, block, stages
):
    asked = []
    properties = SimpleNamespace(**{name: kib << 10})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    aux = SimpleNamespace(lse=None)
    attend = lambda *inputs, kernel_options, **how: asked.append(kernel_options) or (None, aux)  # noqa: E731
    monkeypatch.setattr(card, "_compiled", lambda function, **how: asked.append(how) or attend)
    card._flex(SimpleNamespace(is_cuda=True, shape=(columns,), device=torch.device("cuda")), None, None, score, None)
    how, kernel = asked
    assert how == {"dynamic": True, "fullgraph": True}
    assert (kernel.get("bwd_BLOCK_M1"), kernel.get("num_stages")) == (block, stages)


def test_reads_go_on_unfused_where_the_compiler_fails(monkeypatch):
    def broken(*arguments):
        raise KeyError("no such target")

    monkeypatch.setattr(card, "_compiled", lambda function: broken)
    monkeypatch.setattr(card, "_UNCOMPILED", set())
    v, beta = torch.randn(1, 5, 1, 3), torch.ones(1, 3)
    inputs = v, v, beta, False
    with pytest.warns(UserWarning, match="no such target"):
        found = card._try_compiled(composed_read._prologue, *inputs)
    assert {composed_read._prologue} == card._UNCOMPILED
    ((values, e), (shift, _)), (wanted, *_) = found, composed_read._prologue(*inputs)
    assert torch.equal(values, wanted[0])
    assert torch.equal(e, wanted[1])
    assert shift.shape == (1, 1, 1, 3)


def test_a_bias_is_found_in_64_bits():
    """One of (1, 16, 16k, 16k) has 2^32 entries; FlexAttention gives places in 32 bits."""
    bias, place = torch.randn(1, 2, 3, 4), [torch.tensor([at], dtype=torch.int32) for at in (5, 1, 2, 3)]
    with Dispatched() as seen:
        score = card._biased(bias)(torch.ones(1), *place)
    assert score.item() == 1 + bias[0, 1, 2, 3].item()
    places = [given[1] for function, given, _ in seen.calls if function is torch.ops.aten.index.Tensor]
    assert {index.dtype for at in places for index in at} == {torch.int64}


@torch.no_grad()
@pytest.mark.parametrize("shape", [(1, 1, 9, 9), (2, 4, 9, 9), (2, 1, 1, 9)])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("span", [1.0, 0.01])
def test_a_bias_may_leave_a_row_nothing(shape, window, span):
    """Of values in a narrow span, e is exp(.) - 1, which is 0 also where everything is seen."""
    q, k, v, beta = draw(9)
    v = v * span
    bias = torch.zeros(shape)
    if shape[2] > 1:
        bias[..., 4, :] = -torch.inf
        bias[:, -1, 6] = -torch.inf
    else:
        bias[..., :5] = -torch.inf
        bias[-1, ..., 5] = -torch.inf
    read = composed(q, k, v, beta, bias=bias, window=window)
    for own, other in zip(read, definition(q, k, v, beta, bias=bias, window=window)[0]):
        torch.testing.assert_close(own.double(), other, rtol=1e-5, atol=2e-6)
        assert own[:, 4].eq(0).all()


def test_values_within_a_span_need_no_flag(monkeypatch):
    """The span is the largest that counts as proven, and nothing that would read a value on the host is called."""
    monkeypatch.setattr(composed_read, "exact_where", None)
    q, k, v, beta = draw(24)
    v = v.clamp(-1, 1) * (29 / beta)
    v[:, :2, :, 0] = torch.tensor([-29.0, 29.0])[:, None] / beta[:, 0]
    q[:, -1], k[:, 0], k[:, 1:] = 10.0, 10.0, -10.0  # the last row sees the least value alone
    leaves = [x.requires_grad_() for x in (q, k, v, beta)]
    pairs = Support(True, 0.25)
    mine = *leaves[:3], leaves[2], leaves[3]
    read = composed_read.composed_read(*mine, pairs, span=58.0)
    wanted, exact = definition(*leaves)
    assert wanted.free_energy[:, -1, 0, 0].mul(beta[0, 0]).max() < -28
    torch.testing.assert_close([x.double() for x in read], [*wanted], rtol=1e-4, atol=1e-4)
    weights = torch.randn(2, *read.mean.shape)
    slopes = lambda read, of: torch.autograd.grad(sum((x * w).sum() for x, w in zip(read, weights)), of)  # noqa: E731
    ours, theirs = slopes(read, leaves), slopes(wanted, exact)
    for got, other in zip(ours, theirs):
        torch.testing.assert_close(got.double(), other, rtol=1e-3, atol=1e-3 * other.abs().max().item())
    with pytest.raises(TypeError):
        composed_read.composed_read(*mine, pairs, span=58.1)


@pytest.mark.parametrize(("cap", "span"), [(None, torch.inf), (29.0, 58.0)])
def test_a_layer_with_a_cap_says_what_its_values_span(monkeypatch, cap, span):
    calls = watched(monkeypatch, prior, "softmax_read")
    FreeEnergyMixer(FreeEnergyMixerConfig(n_embd=16, n_head=2, value_logexp_cap=cap))(torch.randn(1, 5, 16))
    assert {how["span"] for _, how, _ in calls} == {span}


SCRIPT = """
import torch
from torch._dynamo.backends.common import aot_autograd
from fem.ops.softmax.composed_read import composed_read
from fem.ops.softmax.support import Support
torch.manual_seed(0)
torch.set_num_threads(1)
most = []
def collect(graph, inputs):
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        for x in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(x, torch.Tensor):
                most.append(x.numel())
    return graph
read = lambda q, k, v, beta: composed_read(q, k, v, v, beta, Support(True, 0.3))
collecting = aot_autograd(fw_compiler=collect, bw_compiler=collect)
for time, spike, backend in ((24, 0.0, "aot_eager"), (24, 300.0, "aot_eager"), (512, 0.0, collecting)):
    torch._dynamo.reset()
    compiled = torch.compile(read, backend=backend, fullgraph=True)
    q, k, v = torch.randn(1, time, 2, 8), torch.randn(1, time, 1, 8), torch.randn(1, time, 1, 4)
    v[:, 12, :, 0] += spike
    results = []
    for function in (read, compiled):
        leaves = [x.clone().requires_grad_() for x in (q, k, v, torch.full((1, 4), 1.5))]
        mean, free_energy = function(*leaves)
        (mean.square().sum() + free_energy.square().sum()).backward()
        results.append([mean, free_energy, *(x.grad for x in leaves)])
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5 * (1 + spike))
print(max(most))
"""


@pytest.mark.slow
def test_prologue_attention_and_epilogue_are_one_graph_without_a_tensor_of_pairs():
    assert int(printed("-c", SCRIPT)) <= 512 * 2 * 16
