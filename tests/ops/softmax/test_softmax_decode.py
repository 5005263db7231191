"""One token of a softmax read over a cache in pieces, and the cache itself."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import FAMILIES, HEADS, WIDTH, make_layer, tokens

from fem.functional import softmax_read
from fem.ops.softmax.decode import softmax_step
from fem.ops.softmax.read import cached_read
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
    cut=st.integers(0, 61),
    spread=st.sampled_from([0.1, 1.0, 30.0]),
    offset=st.sampled_from([0.0, 5.0, -5.0]),
    span=st.sampled_from([1e-3, 1.0, 20.0]),
    masked=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_a_step_equals_the_definition_wherever_the_cache_is_cut(time, cut, spread, offset, span, masked, seed):
    torch.manual_seed(seed)
    q, k, v, beta = draw(time, spread)
    v = v * span + offset
    mask = torch.zeros(2, 1, time).masked_fill(torch.rand(2, 1, time) < 0.3, -math.inf) if masked else None
    cut = min(cut, time - 1)
    cuts = lambda x: [x[:, :, :cut], x[:, :, cut:]] if cut else [x]  # noqa: E731
    read = softmax_step(q, cuts(k), cuts(v), beta, mask, 0.4)
    mean, free = definition(q, k, v, beta, mask, 0.4)
    if read is None:
        assert (beta * v.amax(2) - beta * v.amin(2)).max() > 60
        return
    eps = 2e-6 * (1 + v.abs().max())
    assert (read.mean - mean).abs().max() <= eps
    assert ((read.free_energy - free).abs() * beta.amin()).max() <= eps


def test_an_entry_that_might_be_lost_is_handed_back_and_read_exactly():
    q, k, v, beta = draw(31)
    v[0, 1, 7, 2] += 400
    assert softmax_step(q, [k], [v], beta, None, 0.4) is None
    mean, free = definition(q, k, v, beta, None, 5**-0.5)
    with torch.no_grad():
        read = cached_read(q[:, None], [k[:, :, :9], k[:, :, 9:]], [v[:, :, :9], v[:, :, 9:]], beta)
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
    read = softmax_step(q, [k], [v], beta, mask, 0.0)
    _, free = definition(q, k, v, beta, mask, 0.0)
    torch.testing.assert_close(read.free_energy.double(), free, rtol=1e-5, atol=1e-5)


def test_a_row_that_sees_nothing_reads_0():
    q, k, v, beta = draw(5)
    read = softmax_step(q, [k], [v], beta, torch.full((2, 1, 5), -math.inf), 1.0)
    assert read.mean.eq(0).all()
    assert read.free_energy.eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_results_have_the_dtype_of_the_cache(dtype):
    q, k, v, beta = draw(11)
    with torch.no_grad():
        read = cached_read(*(x.to(dtype) for x in (q[:, None],)), [k.to(dtype)], [v.to(dtype)], beta.to(dtype))
    assert read.mean.dtype == read.free_energy.dtype == dtype


def test_gradients_still_flow_through_one_token():
    q, k, v, beta = draw(11)
    q.requires_grad_()
    read = cached_read(q[:, None], [k[:, :, :3], k[:, :, 3:]], [v[:, :, :3], v[:, :, 3:]], beta)
    (grad,) = torch.autograd.grad(read.free_energy.sum(), q)
    exact = q.detach().double().requires_grad_()
    whole = (x.double().transpose(1, 2) for x in (k, v))
    wanted = softmax_read(exact[:, None], *whole, beta.double(), backend="reference")
    (wanted,) = torch.autograd.grad(wanted.free_energy.sum(), exact)
    torch.testing.assert_close(grad.double(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", SOFTMAX)
@pytest.mark.parametrize("padded", [False, True])
def test_tokens_one_by_one_equal_the_whole_while_pieces_fill_and_are_joined(monkeypatch, family, padded):
    monkeypatch.setattr(kv_cache, "_MOST_RECENT", 3)
    layer, x = make_layer(torch.float32, **FAMILIES[family]), tokens(time=17, dtype=torch.float32)
    mask = torch.ones(2, 17, dtype=torch.long)
    if padded:
        mask[0, :4] = mask[1, 9] = 0
    with torch.no_grad():
        whole = layer(x, attention_mask=mask)
        parts, state, sizes = [], None, []
        for start, end in [(0, 5), *((t, t + 1) for t in range(5, 13)), (13, 15), (15, 16), (16, 17)]:
            part = None if not padded else mask[:, start:end]
            y, state = layer(x[:, start:end], attention_mask=part, state=state, return_state=True)
            parts.append(y)
            sizes.append(len(kv_cache.pieces(state.memory, "key")))
    seen = mask.bool()
    torch.testing.assert_close(torch.cat(parts, 1)[seen], whole[seen], rtol=1e-5, atol=2e-5)
    assert set(sizes) == ({1} if FAMILIES[family].get("window") else {1, 2})


def test_a_state_is_not_changed_by_what_continues_it():
    layer, x = make_layer(torch.float32, prior_type="softmax"), tokens(time=9, dtype=torch.float32)
    with torch.no_grad():
        _, state = layer(x[:, :6], return_state=True)
        _, state = layer(x[:, 6:7], state=state, return_state=True)
        before = {name: tensor.clone() for name, tensor in state.memory.items()}
        one, two = (layer(x[:, t : t + 1], state=state, return_state=True) for t in (7, 8))
    assert state.memory.keys() == before.keys()
    assert all(torch.equal(state.memory[name], tensor) for name, tensor in before.items())
    assert not torch.equal(one[1].memory["recent value"], two[1].memory["recent value"])


def test_a_cache_holds_d_for_a_key_and_d_over_2_for_a_value():
    layer, x = make_layer(torch.float32, prior_type="softmax", use_conv=False), tokens(time=7, dtype=torch.float32)
    with torch.no_grad():
        _, state = layer(x[:, :4], return_state=True)
        _, longer = layer(x[:, 4:5], state=state, return_state=True)
    assert longer.nbytes - state.nbytes == 2 * 4 * (WIDTH + WIDTH // 2)
    assert longer.memory["recent key"].shape == (2, HEADS, 1, WIDTH // HEADS)
