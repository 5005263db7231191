"""One token of a softmax read over a cache, and the cache itself."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from layers import FAMILIES, HEADS, WIDTH, make_layer, tokens
from reads import make
from torch.utils._python_dispatch import TorchDispatchMode

from fem.functional import softmax_read
from fem.ops.softmax import read as read_module
from fem.ops.softmax.cached import cached_read
from fem.ops.softmax.one_query import one_query_read
from fem.priors import kv_cache

SOFTMAX = [name for name in FAMILIES if name.startswith("softmax")]


def definition(q, k, v, beta, mask, scale):
    """Loops in float64 over (B, H, d) queries, (B, H_kv, T, d) keys and values."""
    q, k, v, beta = q.double(), k.double(), v.double(), beta.double()
    mean, free = (torch.zeros(*q.shape[:2], v.shape[3], dtype=torch.float64) for _ in range(2))
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            group = h * k.shape[1] // q.shape[1]
            s = scale * k[b, group] @ q[b, h]
            if mask is not None:
                s = s + mask.expand(q.shape[0], q.shape[1], -1)[b, h]
            if s.max() == -math.inf:
                continue
            log_p = s - s.logsumexp(0)
            for j in range(v.shape[3]):
                mean[b, h, j] = (log_p.exp() * v[b, group, :, j]).sum()
                free[b, h, j] = (log_p + beta[group, j] * v[b, group, :, j]).logsumexp(0) / beta[group, j]
    return mean[:, None], free[:, None]


def draw(time, spread=1.0, key_heads=2, heads=4, batch=2):
    q, k = torch.randn(batch, heads, 5) * spread, torch.randn(batch, key_heads, time, 5)
    v, beta = torch.randn(batch, key_heads, time, 3), torch.rand(key_heads, 3) * 2 + 0.1
    return q, k, v, beta


@settings(max_examples=25, deadline=None)
@given(
    time=st.sampled_from([1, 2, 7, 61]),
    spread=st.sampled_from([0.1, 1.0, 30.0]),
    offset=st.sampled_from([0.0, 5.0, -5.0]),
    span=st.sampled_from([1e-3, 1.0, 20.0]),
    masked=st.booleans(),
    seed=st.integers(0, 1000),
)
# a row that sees no key, beside large values
@example(time=1, spread=0.1, offset=0.0, span=20.0, masked=True, seed=179)
def test_a_step_equals_the_definition(time, spread, offset, span, masked, seed):
    torch.manual_seed(seed)
    q, k, v, beta = draw(time, spread)
    v = v * span + offset
    mask = torch.zeros(2, 1, time).masked_fill(torch.rand(2, 1, time) < 0.3, -math.inf) if masked else None
    mean, free = definition(q, k, v, beta, mask, 0.4)
    eps = (2e-6 + 6e-8 * 0.4 * q.norm(dim=-1).max() * k.norm(dim=-1).max()) * (1 + v.abs().max())  # scores are rounded
    for traced in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.compiler, "is_compiling", lambda traced=traced: traced)
            read = one_query_read(q, k, v, v, beta, mask, 0.4, True)
        assert (read.mean - mean).abs().max() <= eps
        assert ((read.free_energy - free).abs() * beta.amin()).max() <= eps


@pytest.mark.parametrize("beta", [1e30, 1e38])
def test_a_beta_beyond_all_values_reads_the_largest(beta):
    q, k, v, _ = draw(7)
    v, beta = v + 5, torch.full((2, 3), beta)
    read = softmax_read(*(x.transpose(1, 2) for x in (q[:, :, None], k, v)), beta)
    wanted = v.amax(2).repeat_interleave(2, 1)[:, None]
    torch.testing.assert_close(read.free_energy, wanted)


@pytest.mark.parametrize("span", [1e-3, 1.0, 400.0])
@pytest.mark.parametrize("beta", [1e-4, 0.05, 2.0])
def test_one_query_in_a_graph_keeps_its_digits_at_any_span_and_temperature(monkeypatch, span, beta):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    q, k, v, _ = draw(40)
    v, beta = v * span, torch.full((2, 3), beta)
    read = one_query_read(q, k, v, v.clone(), beta, None, 0.4, False)
    for got, wanted in zip(read, definition(q, k, v, beta, None, 0.4)):
        torch.testing.assert_close(got.double(), wanted, rtol=2e-6, atol=1e-6 * span)


@torch.no_grad()
def test_one_query_in_a_graph_reads_what_an_eager_one_does(monkeypatch):
    q, k, v, beta = draw(31)
    q, k, v, keep = q[:, None], k.transpose(1, 2), v.transpose(1, 2), torch.rand(2, 31) < 0.7
    k[~keep], v[~keep] = torch.nan, torch.nan
    calls = [
        lambda: softmax_read(q, k, v, beta, key_mask=keep),
        lambda: softmax_read(q, k.nan_to_num(), v.nan_to_num(), beta, free_values=v.nan_to_num() - 1, window=9),
        lambda: cached_read(q, *(x.nan_to_num().transpose(1, 2) for x in (k, v)), beta, window=5),
    ]
    eager = [call() for call in calls]
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    for wanted, call in zip(eager, calls):
        for got, other in zip(call(), wanted):
            torch.testing.assert_close(got, other, rtol=1e-5, atol=1e-5)


def test_an_entry_that_might_be_lost_is_handed_back_and_read_exactly():
    q, k, v, beta = draw(31)
    v[0, 1, 7, 2] += 400
    mean, free = definition(q, k, v, beta, None, 5**-0.5)
    with torch.no_grad():
        read = cached_read(q[:, None], k, v, beta)
    torch.testing.assert_close(read.mean.double(), mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(read.free_energy.double(), free, rtol=1e-5, atol=1e-5)


@pytest.fixture
def without_denormals():
    assert torch.set_flush_denormal(True)
    yield
    torch.set_flush_denormal(False)


def test_a_token_of_less_weight_than_float32_can_say_counts_by_its_value(without_denormals):
    q, k, v, beta = draw(2, heads=1, key_heads=1, batch=1)
    mask = torch.tensor([[[0.0, -88.5]]])
    v[..., 1, :] = v[..., 0, :] + 87 / beta
    _, free = definition(q, k, v, beta, mask, 0.0)
    read = one_query_read(q, k, v, v, beta, mask, 0.0, True)
    torch.testing.assert_close(read.free_energy.double(), free, rtol=1e-5, atol=1e-5)


def test_large_scores_cost_a_stream_no_digits():
    torch.manual_seed(0)
    call = make("softmax", 80, keys=1, width=1, beta=0.2, spread=0.02, weights=300.0)
    exact = call.map(lambda x: x.double()).definition().free_energy
    with torch.no_grad():
        streamed = call.streamed(*[1] * 80).free_energy
    assert (streamed - exact).abs().max() < 5e-6  # 4e-5 when p was exp(scores - lse)


def test_a_row_that_sees_nothing_reads_0():
    q, k, v, beta = draw(5)
    read = one_query_read(q, k, v, v, beta, torch.full((2, 1, 5), -math.inf), 1.0, True)
    assert read.mean.eq(0).all()
    assert read.free_energy.eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_results_have_the_dtype_of_the_cache(dtype):
    q, k, v, beta = draw(11)
    with torch.no_grad():
        read = cached_read(*(x.to(dtype) for x in (q[:, None],)), k.to(dtype), v.to(dtype), beta.to(dtype))
    assert read.mean.dtype == read.free_energy.dtype == dtype


def test_gradients_still_flow_through_one_token():
    q, k, v, beta = draw(11)
    q.requires_grad_()
    read = cached_read(q[:, None], k, v, beta)
    (grad,) = torch.autograd.grad(read.free_energy.sum(), q)
    exact = q.detach().double().requires_grad_()
    whole = (x.double().transpose(1, 2) for x in (k, v))
    wanted = softmax_read(exact[:, None], *whole, beta.double(), backend="reference")
    (wanted,) = torch.autograd.grad(wanted.free_energy.sum(), exact)
    torch.testing.assert_close(grad.double(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", SOFTMAX)
@pytest.mark.parametrize("padded", [False, True])
def test_tokens_one_by_one_equal_the_whole_while_rooms_fill_and_are_left(family, padded):
    layer, x = make_layer(torch.float32, **FAMILIES[family]), tokens(time=27, dtype=torch.float32)
    mask = torch.ones(2, 27, dtype=torch.long)
    if padded:
        mask[0, :4] = mask[1, 9] = 0
    with torch.no_grad():
        whole = layer(x, attention_mask=mask)
        parts, state, copies = [], None, []
        for start, end in [(0, 9), *((t, t + 1) for t in range(9, 23)), (23, 25), (25, 26), (26, 27)]:
            before = None if state is None else state.memory["key"].data_ptr()
            part = None if not padded else mask[:, start:end]
            y, state = layer(x[:, start:end], attention_mask=part, state=state, return_state=True)
            parts.append(y)
            copies.append(state.memory["key"].data_ptr() != before)
    seen = mask.bool()
    torch.testing.assert_close(torch.cat(parts, 1)[seen], whole[seen], rtol=1e-5, atol=2e-5)
    assert set(copies[2:]) == ({True} if FAMILIES[family].get("window") else {True, False})


def test_a_state_is_not_changed_by_what_continues_it():
    layer, x = make_layer(torch.float32, prior_type="softmax"), tokens(time=9, dtype=torch.float32)
    with torch.no_grad():
        _, state = layer(x[:, :6], return_state=True)
        _, state = layer(x[:, 6:7], state=state, return_state=True)
        before = {name: tensor.clone() for name, tensor in state.memory.items()}
        one, two = (layer(x[:, t : t + 1], state=state, return_state=True) for t in (7, 8))
    assert state.memory.keys() == before.keys()
    assert all(torch.equal(state.memory[name], tensor) for name, tensor in before.items())
    assert not torch.equal(one[1].memory["value"][:, :, 7], two[1].memory["value"][:, :, 7])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_two_continuations_of_a_stream_never_write_to_one_place(mode):
    """The first takes the room behind the cache; the second, and one with a gradient, have a place of their own."""
    layer, x = make_layer(torch.float32, prior_type="softmax"), tokens(time=20, dtype=torch.float32)
    step = lambda state, t: layer(x[:, t : t + 1], state=state, return_state=True)[1]  # noqa: E731
    with mode():
        _, state = layer(x[:, :16], return_state=True)
        state = step(state, 16)
        one, two = step(state, 17), step(state, 18)
        kept = one.memory["key"].clone(), two.memory["key"].clone()
        three = step(one, 19)
    assert one.memory["key"].data_ptr() == state.memory["key"].data_ptr() == three.memory["key"].data_ptr()
    assert two.memory["key"].data_ptr() != one.memory["key"].data_ptr()
    with torch.no_grad():
        step(one, 2), step(three, 3)
    if mode is torch.no_grad:
        learning = layer(x[:, 4:5], state=three, return_state=True)[0]
        step(three, 5)
        learning.sum().backward()
    assert torch.equal(one.memory["key"], kept[0])
    assert torch.equal(two.memory["key"], kept[1])


def test_a_cache_holds_d_for_a_key_and_d_for_a_value_and_its_exponential():
    layer, x = make_layer(torch.float32, prior_type="softmax", use_conv=False), tokens(time=7, dtype=torch.float32)
    with torch.no_grad():
        _, state = layer(x[:, :4], return_state=True)
        _, longer = layer(x[:, 4:5], state=state, return_state=True)
    assert longer.nbytes - state.nbytes == 2 * 4 * (WIDTH + WIDTH)
    assert longer.memory["key"].shape == (2, HEADS, 5, WIDTH // HEADS)


@pytest.mark.parametrize("beta", [1e-6, 1e-3, 0.05, 0.2])
@pytest.mark.parametrize("offset", [0.0, 3.0])
def test_one_query_keeps_the_digits_of_a_small_beta_with_and_without_gradient(beta, offset):
    q, k, v, _ = draw(61)
    v, beta = v + offset, torch.full((2, 3), beta)
    mean, free = definition(q, k, v, beta, None, 5**-0.5)
    unit = 16 * torch.finfo(torch.float32).eps * (1 + v.abs().max())
    arguments = q[:, None], k.transpose(1, 2), v.transpose(1, 2), beta
    one, other = softmax_read(*arguments), softmax_read(q[:, None].requires_grad_(), *arguments[1:])
    for read in (one, other):
        assert (read.free_energy - free).abs().max() <= unit
        assert (read.mean - mean).abs().max() <= unit
    assert ((one.free_energy - other.free_energy) / (1 + v.abs().max())).abs().max() <= 1e-6


def streamed(layer, x, mask=None, first=5):
    """The outputs of tokens one by one after a first chunk, and the state at the end."""
    cut = lambda a, b: None if mask is None else mask[:, a:b]  # noqa: E731
    with torch.no_grad():
        y, state = layer(x[:, :first], attention_mask=cut(0, first), return_state=True)
        parts = [y]
        for t in range(first, x.shape[1]):
            y, state = layer(x[:, t : t + 1], attention_mask=cut(t, t + 1), state=state, return_state=True)
            parts.append(y)
    return torch.cat(parts, 1), state


@pytest.fixture
def exponentials(monkeypatch):
    """How many tokens were read by the form that takes exponentials of the whole cache."""
    taken = []
    monkeypatch.setattr(read_module, "one_query_read", lambda *a: taken.append(1) or one_query_read(*a))
    return taken


@pytest.mark.parametrize("family", SOFTMAX)
@pytest.mark.parametrize("beta_start", [1.8, -7.0])
def test_a_step_over_ordinary_values_takes_no_exponential_of_the_cache(exponentials, family, beta_start):
    layer = make_layer(torch.float32, **FAMILIES[family] | {"beta_max_init": beta_start})
    x = tokens(time=40, dtype=torch.float32)
    y, state = streamed(layer, x)
    with torch.no_grad():
        torch.testing.assert_close(y, layer(x), rtol=1e-5, atol=2e-5)
    assert not exponentials
    assert ("shift" in state.memory) == layer.config.use_lse


def with_values(layer, change):
    """The layer with its values changed by a function of them."""
    whole = layer.values
    layer.values = lambda *inputs: (change(whole(*inputs)[0]), None)
    return layer


CHANGES = {
    "offset": lambda v: v + 1000,
    "wide": lambda v: 300 * v,
    "spike in the prompt": lambda v: torch.where(v > v.amax() - 1e-6, v + 60, v) if v.shape[1] > 1 else v,
    "spike in a step": lambda v: v if v.shape[1] > 1 else v + 60 * (v > 0.1),
    "dip": lambda v: v if v.shape[1] > 1 else v - 60,
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_stream_of_any_values_is_exact_and_leaves_the_packed_form_where_it_must(exponentials, name):
    layer = with_values(make_layer(torch.float32, prior_type="softmax", use_conv=False), CHANGES[name])
    exact = with_values(make_layer(torch.float32, prior_type="softmax", use_conv=False).double(), CHANGES[name])
    x = tokens(time=24, dtype=torch.float32)
    y, _ = streamed(layer, x)
    steps, exponentials[:] = len(exponentials), []
    wanted, _ = streamed(exact, x.double())
    assert (y - wanted).abs().max() <= 2e-5 * (1 + wanted.abs().max())
    assert (steps > 0) == (name not in ("offset", "dip"))  # far below the first tokens hides nothing


def test_a_state_of_the_version_that_kept_values_alone_still_continues():
    layer, x = make_layer(torch.float32, prior_type="softmax"), tokens(time=12, dtype=torch.float32)
    with torch.no_grad():
        _, state = layer(x[:, :7], return_state=True)
        _, state = layer(x[:, 7:8], state=state, return_state=True)
        old = {name: x for name, x in state.memory.items() if name not in kv_cache.PACKED}
        channels = layer.config.value_width
        old |= {name: x[..., :channels] for name, x in old.items() if name.endswith("value")}
        before, after = (layer(x[:, 8:], state=s, return_state=True)[0] for s in (replace(state, memory=old), state))
    torch.testing.assert_close(before, after, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("where", ["prompt", "step"])
def test_nan_in_masked_tokens_of_a_cache_never_shows(where):
    config = {"prior_type": "softmax", "use_conv": False, "use_rope": False}
    layer, x = make_layer(torch.float32, **config), tokens(time=9, dtype=torch.float32)
    at, mask = (2 if where == "prompt" else 7), torch.ones(2, 9, dtype=torch.long)
    mask[:, at] = 0
    clean, _ = streamed(layer, x, mask)
    x[:, at] = torch.nan
    y, _ = streamed(layer, x, mask)
    kept = mask.bool()
    torch.testing.assert_close(y[kept], clean[kept], rtol=0, atol=0)


class Operations(TorchDispatchMode):
    """Counts what is dispatched."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        self.count += 1
        return function(*arguments, **(named or {}))


def test_a_token_without_the_conditioner_costs_half_more_operations_than_attention_at_most():
    """Attention of equal weights, as `fem bench` has it, dispatches 66, views included."""
    layer, x = make_layer(torch.float32, prior_type="softmax", use_conv=False), tokens(time=10, dtype=torch.float32)
    with torch.no_grad():
        _, state = layer(x[:, :8], return_state=True)
        _, state = layer(x[:, 8:9], state=state, return_state=True)  # makes room
        with Operations() as dispatched:
            layer(x[:, 9:], state=state, return_state=True)
    assert dispatched.count <= 99
