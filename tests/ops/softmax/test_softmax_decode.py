"""One token of a softmax read over a cache, and the cache itself: [v | e] with a fixed shift."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from dispatched import Dispatched, watched
from hypothesis import example, given, settings
from hypothesis import strategies as st
from layers import FAMILIES, make_layer, streamed, tokens
from reads import flushed, make, of_one_query

from fem.functional import softmax_read
from fem.ops.softmax import cached
from fem.ops.softmax import softmax_read as read_module
from fem.ops.softmax.cached import cached_read
from fem.ops.softmax.one_query import one_query_read
from fem.priors import kv_cache

TIME, KEY = 33, 16
SOFTMAX = [name for name in FAMILIES if name.startswith("softmax")]


def draw(time=TIME, spread=1.0, heads=4, key_heads=2, batch=2, key=5, value=3, beta=None):
    """A query (B, H, d), and keys and values (B, H_kv, T, .)."""
    q, k = torch.randn(batch, heads, key) * spread, torch.randn(batch, key_heads, time, key)
    of_v = torch.rand(key_heads, value) * 2 + 0.1 if beta is None else torch.full((key_heads, value), float(beta))
    return q, k, torch.randn(batch, key_heads, time, value), of_v


def definition(q, k, v, beta, mask=None, scale=1e-30):
    return of_one_query(q, k, v, v, beta, mask, scale)


def unit_of(v):
    return 16 * torch.finfo(torch.float32).eps * (1 + v.abs().max())


def read_packed(q, k, v, beta, shift, dtype=torch.float32):
    """Queries of all heads by attention over the packed values."""
    how = cached.fixed_packing(beta[:, None], shift[:, None])
    packed = cached.pack(v.to(dtype), v.to(dtype), how)
    out = F.scaled_dot_product_attention(q[:, :, None].to(dtype), k.to(dtype), packed)
    return cached.unpack(out, how)


@pytest.mark.parametrize("beta", [1e-6, 1e-3, 0.05, 0.099, 0.1, 1.0, 5.0])
@pytest.mark.parametrize("shift", [0.0, -1.0, 3.0])
def test_the_packed_free_energy_keeps_its_digits_at_any_temperature(beta, shift):
    q, k, v, beta = draw(heads=2, beta=beta)
    packed = read_packed(q, k, v, beta, torch.full_like(beta, shift))
    for got, wanted in zip(packed, definition(q, k, v, beta, scale=5**-0.5)):
        assert (got - wanted.transpose(1, 2)).abs().max() <= unit_of(v)


def test_bfloat16_is_off_by_its_own_digits_over_beta():
    q, k, v, beta = draw(heads=2, beta=2.0)
    q, k, v = (x.bfloat16() for x in (q, k, v))
    free_energy = read_packed(q, k, v, beta, torch.zeros_like(beta), torch.bfloat16).free_energy
    wanted = definition(q, k, v, beta, scale=5**-0.5).free_energy.transpose(1, 2)
    assert ((free_energy - wanted) * 2.0).abs().max() <= 5 * 2**-9  # of e, of P, of R, and of scores


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_whole_reach_of_a_dtype_is_right_and_clipped_beyond(dtype):
    reach, beta = cached.REACH[dtype], torch.ones(1, dtype=torch.float64)
    inside = torch.linspace(-reach, reach, 41, dtype=torch.float64).to(dtype)[:, None]
    inside = inside.clamp(-reach, reach).where(inside.abs() <= reach, 0)
    how = cached.fixed_packing(beta, torch.zeros(1))
    e = cached.pack(inside, inside, how)[:, 1:]
    assert (e.double().log() - inside.double()).abs().max() <= 2 * torch.finfo(dtype).eps
    beyond = torch.tensor([[-10 * reach], [10 * reach]], dtype=dtype)
    packed = cached.pack(beyond, beyond, how)
    assert torch.equal(packed[:, :1], beyond)
    assert packed.isfinite().all()
    assert (packed[:, 1:] > 0).all()


@pytest.mark.parametrize("case", ["spike", "dip", "later spike", "small beta", "weight lost to underflow"])
@torch.no_grad()
def test_what_is_not_exact_is_not_proven(case):
    """One query over a packed cache: by attention where that is exact, else as if the cache held values."""
    q, k, v, beta = draw(heads=2, key=KEY, value=8, beta=0.05 if case == "small beta" else 2.0)
    if case == "dip":
        v -= 40
    elif case == "small beta":
        v *= 200
    elif case == "weight lost to underflow":  # p = e^-95 of the first key, in float32 nothing, carries much of R
        q, k[:, :, :1], k[:, :, 1:] = torch.ones_like(q), -95 / KEY**0.5, 0.0
        v, beta = torch.zeros_like(v), torch.ones_like(beta)
        v[:, :, 0] = 95
    else:
        v[:, :, TIME - 1 if case == "later spike" else 0] += 20
    how = cached.fixed_packing(beta[None, :, None], torch.zeros(2, 2, 1, 8))
    values = cached.pack_exactly(v, None, how)
    assert cached._packed_step(q, k, values, how, None, KEY**-0.5) is None
    for got, wanted in zip(cached_read(q[:, None], k, values, beta, how), definition(q, k, v, beta, scale=KEY**-0.5)):
        assert (got - wanted).abs().max() <= unit_of(v)


@pytest.mark.parametrize("beta", [0.01, 2.0])
def test_rows_without_keys_read_0(beta):
    how = cached.fixed_packing(torch.full((8,), beta), torch.full((8,), 3.0))
    assert not any(x.any() for x in cached.unpack(torch.zeros(2, 16), how))
    q, k, v, beta = draw(5, beta=beta)
    assert not any(x.any() for x in one_query_read(q, k, v, v, beta, torch.full((2, 1, 5), -math.inf), 1.0, True))


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


@pytest.mark.parametrize("span", [1e-3, 1.0, 400.0])
@pytest.mark.parametrize("beta", [1e-4, 0.05, 2.0])
def test_one_query_in_a_graph_keeps_its_digits_at_any_span_and_temperature(monkeypatch, span, beta):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    q, k, v, beta = draw(40, beta=beta)
    v = v * span
    read = one_query_read(q, k, v, v.clone(), beta, None, 0.4, False)
    wanted = definition(q, k, v, beta, scale=0.4)
    torch.testing.assert_close([x.double() for x in read], [*wanted], rtol=2e-6, atol=1e-6 * span)


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
    torch.testing.assert_close([call() for call in calls], eager, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("hidden", [0.0, 1e30, torch.nan, torch.inf])
@pytest.mark.parametrize("mark", ["key_mask", "bias"])
@torch.no_grad()
def test_a_cache_is_copied_only_where_masked_tokens_hold_no_numbers(monkeypatch, mark, hidden):
    q, k, v, beta = draw(31)
    q, k, v, keep = q[:, None], k.transpose(1, 2), v.transpose(1, 2), torch.rand(2, 31) < 0.7
    marks = {mark: keep if mark == "key_mask" else torch.where(keep, 0.0, -torch.inf)[:, None, None]}
    wanted = softmax_read(q, k, v, beta, **marks, backend="reference")
    k[~keep], v[~keep] = hidden, hidden
    copied = watched(monkeypatch, read_module, "without_masked")
    torch.testing.assert_close(softmax_read(q, k, v, beta, **marks), wanted, rtol=1e-5, atol=1e-5)
    assert bool(copied) == (not math.isfinite(hidden))


def test_a_token_of_less_weight_than_float32_can_say_counts_by_its_value():
    q, k, v, beta = draw(2, heads=1, key_heads=1, batch=1)
    mask = torch.tensor([[[0.0, -88.5]]])
    v[..., 1, :] = v[..., 0, :] + 87 / beta
    with flushed():
        read = one_query_read(q, k, v, v, beta, mask, 0.0, True)
    wanted = definition(q, k, v, beta, mask).free_energy
    torch.testing.assert_close(read.free_energy.double(), wanted, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_large_scores_cost_a_stream_no_digits():
    call = make("softmax", 80, keys=1, width=1, beta=0.2, spread=0.02, weights=300.0)
    exact = call.map(lambda x: x.double()).definition().free_energy
    assert (call.streamed(*[1] * 80).free_energy - exact).abs().max() < 5e-6  # 4e-5 when p was exp(scores - lse)


@pytest.fixture
def exponentials(monkeypatch):
    """How many tokens were read by the form that takes exponentials of the whole cache."""
    return watched(monkeypatch, read_module, "one_query_read")


@pytest.mark.parametrize("family", SOFTMAX)
@pytest.mark.parametrize("padded, beta_start", [(False, 1.8), (True, 1.8), (False, -7.0)])
@torch.no_grad()
def test_tokens_one_by_one_equal_the_whole_while_rooms_fill_and_are_left(exponentials, family, padded, beta_start):
    """Without an exponential of the whole cache, as values are ordinary."""
    layer = make_layer(torch.float32, **FAMILIES[family] | {"beta_max_init": beta_start})
    x, mask = tokens(time=43, dtype=torch.float32), torch.ones(2, 43, dtype=torch.long)
    if padded:
        mask[0, :4] = mask[1, 9] = 0
    y, states = streamed(layer, x, [5, *[1] * 34, 2, 1, 1], **{"attention_mask": mask} if padded else {})
    torch.testing.assert_close(y[mask.bool()], layer(x, attention_mask=mask)[mask.bool()], rtol=1e-5, atol=2e-5)
    assert not exponentials
    assert ("shift" in states[-1].memory) == layer.config.use_lse
    places = [state.memory["key"].data_ptr() for state in states]
    copies = {one != other for one, other in pairwise(places[1:])}
    assert copies == ({True} if FAMILIES[family].get("window") else {True, False})


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_two_continuations_of_a_stream_never_write_to_one_place(mode):
    """The first takes the room behind the cache; the second, and one with a gradient, have a place of their own."""
    layer, x = make_layer(torch.float32, prior_type="softmax"), tokens(time=28, dtype=torch.float32)
    step = lambda state, t: layer(x[:, t : t + 1], state=state, return_state=True)[1]  # noqa: E731
    with mode():
        _, state = layer(x[:, :24], return_state=True)
        state = step(state, 24)
        one, two = step(state, 25), step(state, 26)
        kept = one.memory["key"].clone(), two.memory["key"].clone()
        three = step(one, 27)
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


@torch.no_grad()
def token_by_token(layer, x, first=5, **marks):
    """The outputs of tokens one by one after a first chunk, and the states along the way."""
    return streamed(layer, x, [first, *[1] * (x.shape[1] - first)], **marks)


CHANGES = {
    "offset": lambda v: v + 1000,
    "wide": lambda v: 300 * v,
    "spike in the prompt": lambda v: torch.where(v > v.amax() - 1e-6, v + 60, v) if v.shape[1] > 1 else v,
    "spike in a step": lambda v: v if v.shape[1] > 1 else v + 60 * (v > 0.1),
    "dip": lambda v: v if v.shape[1] > 1 else v - 60,
}


# Whether the first and the last cache of split values are packed.
SPLIT = dict.fromkeys(CHANGES, (False, False)) | {"offset": (True, True)}
SPLIT |= dict.fromkeys(("spike in a step", "dip"), (True, False))


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("split", [False, True])
def test_a_stream_of_any_values_is_exact_and_packed_where_it_may_be(exponentials, monkeypatch, name, split):
    fields = {"free_share": 0.5} if split else {}
    x, layer = tokens(time=24), make_layer(torch.float32, prior_type="softmax", use_conv=False, **fields)
    whole = layer.modulated
    layer.modulated = lambda *inputs: CHANGES[name](whole(*inputs))
    y, states = token_by_token(layer, x.float())
    if split:  # whose own values must come back from e: a cache of [v | e] becomes one of [v | f]
        assert ("shift" in states[0].memory, "shift" in states[-1].memory) == SPLIT[name]
    else:
        assert bool(exponentials) == (name not in ("offset", "dip"))  # far below the first tokens hides nothing
    monkeypatch.setattr(kv_cache, "pack_exactly", lambda *values: None)
    wanted, _ = token_by_token(layer.double(), x.float().double())
    assert (y - wanted).abs().max() <= 2e-5 * (1 + wanted.abs().max())


def test_a_stream_that_leaves_autocast_keeps_the_digits_of_later_tokens():
    layer, x = make_layer(torch.float32, prior_type="softmax"), tokens(time=9, dtype=torch.float32)
    with torch.no_grad():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            _, state = layer(x[:, :8], return_state=True)
        _, after = layer(x[:, 8:], state=state, return_state=True)
    assert [s.memory["key"].dtype for s in (state, after)] == [torch.bfloat16, torch.float32]


def test_a_state_of_the_version_that_kept_values_alone_still_continues():
    layer, x = make_layer(torch.float32, prior_type="softmax"), tokens(time=12, dtype=torch.float32)
    _, (*_, state) = token_by_token(layer, x[:, :8], first=7)
    old = {name: x for name, x in state.memory.items() if name not in kv_cache.PACKED}
    old |= {name: x[..., : layer.config.value_width] for name, x in old.items() if name.endswith("value")}
    with torch.no_grad():
        before, after = (layer(x[:, 8:], state=s) for s in (replace(state, memory=old), state))
    torch.testing.assert_close(before, after, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("at", [2, 7], ids=["prompt", "step"])
def test_nan_in_masked_tokens_of_a_cache_never_shows(at):
    config = {"prior_type": "softmax", "use_conv": False, "use_rope": False}
    layer, x = make_layer(torch.float32, **config), tokens(time=9, dtype=torch.float32)
    mask = (torch.arange(9) != at).long().expand(2, -1)
    clean, _ = token_by_token(layer, x, attention_mask=mask)
    x[:, at] = torch.nan
    y, _ = token_by_token(layer, x, attention_mask=mask)
    torch.testing.assert_close(y[mask.bool()], clean[mask.bool()], rtol=0, atol=0)


def test_a_token_without_the_conditioner_costs_half_more_operations_than_attention_at_most():
    """Attention of equal weights, as `fem bench` has it, dispatches 66, views included."""
    layer, x = make_layer(torch.float32, prior_type="softmax", use_conv=False), tokens(time=10, dtype=torch.float32)
    _, states = token_by_token(layer, x[:, :9], first=9)  # with room for one more
    with torch.no_grad(), Dispatched() as dispatched:
        layer(x[:, 9:], state=states[-1], return_state=True)
    assert len(dispatched.calls) <= 99
