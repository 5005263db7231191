"""The Triton kernels against float64: in Triton's interpreter, run so by tests/ops/test_kernels.py, or on a GPU.

python -m pytest tests/ops/softmax/kernels_softmax_read.py -o addopts=
"""

import pytest
import torch
from interpreter import DEVICE, patch_the_language_once

from fem.functional import softmax_read
from fem.ops.softmax import read as softmax
from fem.ops.softmax.kernels import launch as softmax_triton
from fem.ops.softmax.naive import naive_softmax_read
from fem.ops.softmax.support import intervals

patch_the_language_once()
KEY_HEADS, KEY, VALUE = 1, 24, 12
SHIFT_ROWS = 64  # queries that share the shifts of a wide head
NAMES = ("mean", "free_energy", "dq", "dk", "dv", "dbeta", "dbias")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def on_device():
    with torch.device(DEVICE):
        yield


def inputs(queries=41, keys=41, heads=2, span=None, spike=None, batch=1, at=None):
    q, k = torch.randn(batch, queries, heads, KEY), torch.randn(batch, keys, KEY_HEADS, KEY)
    beta = torch.rand(KEY_HEADS, VALUE) + 1.5
    v = torch.randn(batch, keys, KEY_HEADS, VALUE)
    if span is not None:
        v = torch.rand(batch, keys, KEY_HEADS, VALUE) * span / beta
    if spike is not None:
        v[:, keys // 2 if at is None else at] = spike / beta
    return q, k, v, beta


def results(read, arguments, weights, dtype, bias=None, **options):
    """Both reads, and the gradients of their weighted sum."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in arguments]
    if bias is not None:
        options["bias"] = bias.detach().to(dtype, copy=True).requires_grad_()
        leaves.append(options["bias"])
    mean, free_energy = read(*leaves[:4], **options)
    sum((part * weight.to(dtype)).sum() for part, weight in zip((mean, free_energy), weights)).backward()
    return [mean.detach(), free_energy.detach(), *(x.grad for x in leaves)]


def triton_read(*arguments, **options):
    return softmax_read(*arguments, backend="triton", **options)


def weights_of(arguments):
    q, _, v, _ = arguments
    return [torch.randn(*q.shape[:3], v.shape[3]) for _ in range(2)]


def check(arguments, **options):
    weights = weights_of(arguments)
    ours = results(triton_read, arguments, weights, torch.float32, **options)
    exact = results(naive_softmax_read, arguments, weights, torch.float64, **options)
    for name, got, want in zip(NAMES, ours, exact, strict=False):
        assert got.dtype == torch.float32
        assert (got - want).abs().max() <= 1e-5 * want.abs().max().clamp_min(0.1), name


def segments(keys):
    return (torch.rand(1, keys) < 0.15).cumsum(1)


SUPPORTS = {
    "causal": {},
    "full": {"causal": False},
    "window": {"window": 7},
    "full window": {"window": 5, "causal": False},
    "segments": {"segment_ids": segments(41)},
    "mask": {"key_mask": torch.rand(1, 41) > 0.3},
    "all": {"segment_ids": segments(41), "key_mask": torch.rand(1, 41) > 0.3, "window": 5},
    "full all": {"segment_ids": segments(41), "key_mask": torch.rand(1, 41) > 0.3, "window": 5, "causal": False},
    "left padding": {"key_mask": torch.arange(41)[None] > 35},
}


@pytest.mark.parametrize("support", SUPPORTS)
def test_both_reads_and_every_gradient_are_those_of_the_definition(support):
    check(inputs(), **{name: x.to(DEVICE) if torch.is_tensor(x) else x for name, x in SUPPORTS[support].items()})


@pytest.mark.parametrize(
    ("queries", "keys", "causal"), [(1, 1, True), (32, 32, True), (5, 67, True), (1, 67, True), (41, 7, False)]
)
def test_any_number_of_queries_and_keys(queries, keys, causal):
    check(inputs(queries, keys), causal=causal)


@pytest.mark.parametrize("span", [0.0, 0.4, 80.0, 500.0])
def test_any_span_of_values(span):
    check(inputs(37, 37, span=span))


@pytest.mark.parametrize("spike", [40.0, 80.0, 500.0])
def test_a_spike_hides_no_other_row(spike):
    softmax.suspects.reset()
    check(inputs(37, 37, spike=spike))
    assert (softmax.suspects.recomputed > 0) == (spike > 60)


@pytest.mark.parametrize("spike", [80.0, 500.0])
def test_a_late_spike_leaves_only_its_own_block_of_queries_to_the_definition(spike):
    softmax.suspects.reset()
    check(inputs(67, 67, heads=1, spike=spike, at=66))
    assert softmax.suspects.recomputed == (66 - SHIFT_ROWS) * VALUE


def test_a_spike_that_has_left_the_window_is_forgotten():
    softmax.suspects.reset()
    check(inputs(67, 67, heads=1, spike=80.0, at=0), window=9)
    assert softmax.suspects.recomputed == (SHIFT_ROWS - 9) * VALUE


def test_wide_and_narrow_heads_are_read_side_by_side():
    arguments = [x.repeat(1, 1, 2, 1) for x in inputs(19, 19, batch=2)[:3]]
    arguments[2][0, 7, 1, 3] = 90.0
    check([*arguments, torch.rand(2, VALUE) + 1.5], key_mask=torch.rand(2, 19) > 0.2)


HALF_CASES = {
    "normal": ({}, 0),
    "span": ({"span": 15.0}, 0),
    "wide": ({"span": 80.0}, 1),
    "spike": ({"spike": 80.0}, 1),
}


@pytest.mark.parametrize(("case", "wide"), HALF_CASES.values(), ids=HALF_CASES)
def test_half_precision_multiplies_numbers_of_eleven_digits(case, wide):
    q, k, v, beta = inputs(37, 37, heads=1, **case)
    arguments = [*(x.bfloat16().float() for x in (q, k, v)), beta]
    weights = weights_of(arguments)
    seen = intervals(37, 37, True, None, None, q.device)

    def read(q, k, v, beta):
        outputs = softmax_triton._forward(q, k, v, beta, None, None, seen.first, seen.end, KEY**-0.5, True)
        assert outputs[6] == wide
        return outputs[:2]

    ours = results(read, arguments, weights, torch.float32)
    exact = results(naive_softmax_read, arguments, weights, torch.float64)
    assert ((ours[1] - exact[1]).abs() * beta).max() <= 4e-3
    for name, got, want in zip(NAMES, ours, exact):
        assert (got - want).norm() <= 2**-10 * want.norm(), name


def test_rows_of_a_batch_have_supports_of_their_own():
    mask = torch.rand(2, 19) > 0.4
    check(inputs(19, 19, batch=2), key_mask=mask, segment_ids=segments(19).expand(2, -1) * mask)


@pytest.mark.parametrize("shape", [(2, 37, 37), (1, 1, 37), (1, 2, 1, 37)])
def test_a_bias_of_any_shape_and_its_gradient(shape):
    check(inputs(37, 37), bias=torch.randn(shape))


def test_a_bias_may_forbid_keys_and_empty_rows():
    bias = torch.randn(2, 37, 37)
    bias[0, 5] = bias[:, :, 3] = -torch.inf
    check(inputs(37, 37), bias=bias)


def test_a_small_beta_keeps_the_digits_of_the_free_energy():
    q, k, v, beta = inputs(17, 17)
    read = triton_read(q, k, v, beta / 1000)
    exact = naive_softmax_read(q, k, v, beta / 1000)
    assert (read.free_energy - exact.free_energy).abs().max() < 2e-6


def test_future_tokens_change_nothing():
    q, k, v, beta = inputs(37, 37)
    before = triton_read(q, k, v, beta)
    k[:, 20:], v[:, 20:] = torch.randn_like(k[:, 20:]), torch.randn_like(v[:, 20:]) + 7
    after = triton_read(q, k, v, beta)
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one[:, :20], other[:, :20])


def test_gradients_repeat_bit_by_bit():
    arguments, weights = inputs(41, 41, spike=80.0), torch.randn(2, 1, 41, 2, VALUE)
    for one, other in zip(*(results(triton_read, arguments, weights, torch.float32) for _ in range(2)), strict=True):
        assert torch.equal(one, other)


def test_half_precision_comes_back_in_its_dtype():
    arguments = [x.bfloat16() for x in inputs(17, 17)]
    read, exact = triton_read(*arguments), naive_softmax_read(*arguments)
    for got, want in zip(read, exact, strict=True):
        assert got.dtype == torch.bfloat16
        assert (got - want).abs().max() <= 2**-8 * want.abs().max()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda q, k, v, beta: (q.double(), k.double(), v.double(), beta), "float64"),
        (lambda q, k, v, beta: (q, k, v.repeat(1, 1, 1, 20), beta.repeat(1, 20)), "240"),
    ],
)
def test_what_the_kernels_cannot_read_is_named(change, named):
    with pytest.raises(ValueError, match=named):
        triton_read(*change(*inputs(3, 3)))


def test_a_scale_that_is_not_positive_is_named():
    with pytest.raises(ValueError, match=r"scale > 0, got -1\.0"):
        triton_read(*inputs(3, 3), scale=-1.0)


def test_the_mean_alone_and_no_tokens_at_all_are_read_too():
    q, k, v, beta = inputs(7, 7)
    mean, nothing = triton_read(q, k, v, None)
    assert nothing is None
    torch.testing.assert_close(mean, triton_read(q, k, v, beta).mean)
    assert triton_read(q[:0], k[:0], v[:0], beta).mean.shape == (0, 7, 2, VALUE)
