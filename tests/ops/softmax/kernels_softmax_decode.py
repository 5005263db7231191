"""The kernels that read a few queries over a cache, against float64: run as kernels_softmax_read.py is."""

import pytest
import torch
from interpreter import DEVICE, patch_the_language_once

from fem.functional import softmax_read
from fem.ops.common import fallback_count as suspects
from fem.ops.softmax.kernels import launch_decode as softmax_decode
from fem.ops.softmax.naive import naive_softmax_read

patch_the_language_once()
KEYS, KEY_HEADS, KEY, VALUE = 83, 2, 24, 12
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def on_device(monkeypatch):
    monkeypatch.setattr(softmax_decode, "_SHORTEST_SPLIT", 16)  # five parts of the cache, the last one shorter
    with torch.device(DEVICE), torch.no_grad():
        yield


def inputs(queries=1, groups=2, keys=KEYS, batch=1, span=None):
    q, k = torch.randn(batch, queries, groups * KEY_HEADS, KEY), torch.randn(batch, keys, KEY_HEADS, KEY)
    beta = torch.rand(KEY_HEADS, VALUE) + 1.5
    v = torch.randn(batch, keys, KEY_HEADS, VALUE) if span is None else torch.rand(batch, keys, KEY_HEADS, VALUE)
    return q, k, v if span is None else v * span / beta, beta


def check(arguments, **options):
    ours = softmax_read(*arguments, backend="triton", **options)
    exact = naive_softmax_read(*(x.double() for x in arguments), **options)
    for name, got, want in zip(ours._fields, ours, exact):
        assert (got - want).abs().max() <= 1e-5 * want.abs().max().clamp_min(0.1), name
    return ours


def test_the_cache_is_split():
    assert softmax_decode.split_count(KEYS, KEY_HEADS) == 5


@pytest.mark.parametrize(("queries", "groups"), [(1, 1), (1, 2), (2, 2), (3, 1), (1, 7)])
def test_few_queries_of_any_group(queries, groups):
    check(inputs(queries, groups))


@pytest.mark.parametrize("keys", [1, 2, 17, 64, 131])
def test_caches_of_any_length(keys):
    check(inputs(keys=keys))


@pytest.mark.parametrize("span", [0.0, 0.4, 80.0, 500.0])
def test_any_span_of_values(span):
    check(inputs(span=span))


@pytest.mark.parametrize("spike", [80.0, 500.0])
def test_a_spike_of_little_weight_starves_no_channel_and_nothing_is_computed_again(spike):
    q, k, v, beta = inputs()
    v[:, 40] = spike / beta
    k[:, 40] = -10 * q.unflatten(2, (KEY_HEADS, -1)).mean(3)[:, 0]
    suspects.suspects.reset()
    check((q, k, v, beta))
    assert suspects.suspects.recomputed == 0


@pytest.mark.parametrize(
    "options",
    [
        {"window": 7},
        {"causal": False},
        {"key_mask": torch.arange(KEYS)[None] > 30},
        {"key_mask": torch.rand(1, KEYS) > 0.5, "segment_ids": torch.arange(KEYS)[None] // 50, "window": 9},
    ],
    ids=str,
)
def test_windows_documents_and_padding(options):
    check(inputs(queries=2), **{name: x.to(DEVICE) if torch.is_tensor(x) else x for name, x in options.items()})


def test_rows_of_a_batch_have_supports_of_their_own_and_may_see_nothing():
    mask = torch.arange(KEYS) >= torch.tensor([0, 60, KEYS])[:, None]
    read = check(inputs(batch=3), key_mask=mask)
    assert (read.free_energy[2] == 0).all()
    assert (read.mean[2] == 0).all()


@pytest.mark.parametrize("shape", [(4, 1, KEYS), (1, 1, KEYS), (1, 4, 1, 1)])
def test_a_bias_of_any_shape(shape):
    bias = torch.randn(shape)
    if shape[-1] > 1:
        bias[..., 5] = -torch.inf
    check(inputs(), bias=bias, key_mask=torch.rand(1, KEYS) > 0.2)


def test_a_small_beta_keeps_the_digits_of_the_free_energy():
    q, k, v, beta = inputs()
    read = softmax_read(q, k, v, beta / 1000, backend="triton")
    exact = naive_softmax_read(*(x.double() for x in (q, k, v, beta / 1000)))
    assert (read.free_energy - exact.free_energy).abs().max() < 2e-6


def test_views_of_a_longer_cache_are_read_in_place():
    q, k, v, beta = inputs()
    longer = [torch.cat([x, torch.full_like(x, torch.nan)], 1).transpose(1, 2).contiguous() for x in (k, v)]
    views = [x[:, :, :KEYS].transpose(1, 2) for x in longer]
    for got, want in zip(softmax_read(q, *views, beta, backend="triton"), check((q, k, v, beta))):
        assert torch.equal(got, want)


def test_half_precision_comes_back_in_its_dtype():
    arguments = [x.bfloat16() for x in inputs()]
    read, exact = softmax_read(*arguments, backend="triton"), naive_softmax_read(*arguments)
    for got, want in zip(read, exact):
        assert got.dtype == torch.bfloat16
        assert (got - want).abs().max() <= 2**-8 * want.abs().max()


def test_gradients_take_the_kernels_that_have_them():
    q, k, v, beta = inputs()
    with torch.enable_grad():
        read = softmax_read(q.requires_grad_(), k, v, beta, backend="triton")
        assert read.free_energy.requires_grad
    torch.testing.assert_close(read.free_energy.detach(), softmax_read(q, k, v, beta, backend="triton").free_energy)
