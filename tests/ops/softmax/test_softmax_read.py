"""The softmax read against loops over its definition in float64, and what it promises of tokens, masks and dtypes."""

import shutil
import subprocess
import sys
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_softmax import naive_softmax_read
from softmax_calls import softmax_call

from fem.functional import softmax_read
from fem.ops.common.fallback_count import FallbackCount
from fem.ops.softmax import exact as softmax

BATCH, HEADS, KEY, VALUE = 1, 2, 16, 8  # [v | e] is as wide as the keys
WIDER = 13
NAMES = ("mean", "free_energy", "dq", "dk", "dv", "dbeta", "dbias")


@pytest.fixture(autouse=True)
def warn_again():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def inputs(case, queries, time, dtype=torch.float32, width=VALUE):
    q, k = torch.randn(BATCH, queries, HEADS, KEY), torch.randn(BATCH, time, HEADS, KEY)
    v, beta, bias = torch.randn(BATCH, time, HEADS, width), torch.rand(HEADS, width) + 1.5, None
    kind, _, size = case.partition(" ")
    if kind == "span":
        v = torch.rand(BATCH, time, HEADS, width) * float(size) / beta
    if kind == "spike":
        v[:, time // 2] += float(size)
    if kind == "one-channel-spike":
        v[:, time // 2, :, 0] += float(size)
    if kind == "improbable-spike":
        bias = torch.zeros(1, 1, queries, time)
        bias[..., time // 3] = -50
        v[:, time // 3] += 40
    if kind == "scores":
        q = q * 20
    if kind == "offset":
        v = v + float(size)
    if kind == "beta":
        beta = beta * float(size)
    if kind == "bias":
        bias = torch.randn(HEADS, queries, time)
    return [None if x is None else x.to(dtype) for x in (q, k, v, beta, bias)]


def plain(q, k, v, beta, bias):
    """logsumexp_i(log p_ti + beta_j v_ij), materialised in the dtype of the inputs."""
    s = torch.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
    s = s if bias is None else s + bias
    future = torch.ones(k.shape[1], k.shape[1], dtype=torch.bool).triu(1)[k.shape[1] - q.shape[1] :]
    log_p = torch.log_softmax(s.masked_fill(future, -torch.inf), -1)
    exponents = log_p[..., None] + (beta * v).transpose(1, 2)[:, :, None]
    return torch.einsum("bhts,bshd->bthd", log_p.exp(), v), torch.logsumexp(exponents, 3).transpose(1, 2) / beta


def results(read, arguments, weights, dtype):
    """Both reads, and the gradients of their weighted sum."""
    leaves = [None if x is None else x.detach().to(dtype).requires_grad_() for x in arguments]
    mean, free_energy = read(*leaves)
    sum((part * weight.to(dtype)).sum() for part, weight in zip((mean, free_energy), weights)).backward()
    return [mean.detach(), free_energy.detach(), *(None if x is None else x.grad for x in leaves)]


def with_backend(backend):
    return lambda q, k, v, beta, bias: softmax_read(q, k, v, beta, bias=bias, backend=backend)


def exact(q, k, v, beta, bias):
    return naive_softmax_read(q, k, v, beta, bias=bias)


def check_two_times_rule(case, queries, time, dtype, backend, width=VALUE):
    arguments = inputs(case, queries, time, dtype, width)
    weights = [torch.randn(BATCH, queries, HEADS, width).to(dtype) for _ in range(2)]
    wanted = results(exact, arguments, weights, torch.float64)
    ours, naive = (results(read, arguments, weights, dtype) for read in (with_backend(backend), plain))
    unit = 1 + arguments[2].abs().max().double()
    for name, want, got, other in zip(NAMES, wanted, ours, naive):
        if want is None:
            continue
        assert got.dtype == dtype
        assert got.isfinite().all(), name
        largest = want.abs().max()
        scale = largest if name.startswith("d") and largest > 1e-9 else 1.0
        error, allowed = ((x.double() - want).abs().max() / scale for x in (got, other))
        assert error <= max(2 * allowed, 16 * torch.finfo(dtype).eps * unit), name
        if name == "free_energy" and dtype == torch.float32:
            assert error <= 1e-5 * unit


CASES = [
    "normal",
    "bias",
    "scores",
    "span 0",
    "span 0.4",
    "span 2",
    "span 50",
    "span 200",
    "span 1000",
    "beta 0.001",
    "beta 50",
    "offset 1000",
    "spike 25",
    "spike 500",
    "one-channel-spike 500",
    "improbable-spike",
]
SHAPES = [(1, 1), (2, 2), (17, 17), (127, 127), (5, 127), (1, 127)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend, width", [("sdpa", VALUE), ("sdpa", WIDER), ("plain", VALUE)])
def test_errors_are_at_most_twice_those_of_the_plain_form(case, backend, width):
    for queries, time in SHAPES:
        if queries > 2 or case != "scores":  # a gradient of few rows is the rounding of what cancels there
            check_two_times_rule(case, queries, time, torch.float32, backend, width)


@pytest.mark.parametrize("case", ["normal", "scores", "span 200", "spike 500", "improbable-spike"])
@pytest.mark.parametrize("width", [VALUE, WIDER])
def test_long_sequences_are_as_exact(case, width):
    check_two_times_rule(case, 384, 384, torch.float32, "sdpa", width)


@pytest.mark.parametrize("case", ["normal", "bias", "span 50", "span 1000", "spike 500", "beta 0.001"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_loses_no_more_than_the_plain_form(case, dtype):
    for queries, time in [(1, 1), (17, 17), (5, 61)]:
        check_two_times_rule(case, queries, time, dtype, "sdpa")


@pytest.mark.parametrize("case", CASES)
def test_float64_is_float64(case):
    arguments = inputs(case, 13, 17, torch.float64)
    weights = [torch.randn(BATCH, 13, HEADS, VALUE, dtype=torch.float64) for _ in range(2)]
    wanted = results(exact, arguments, weights, torch.float64)
    for backend in ("sdpa", "plain"):
        for name, want, got in zip(NAMES, wanted, results(with_backend(backend), arguments, weights, torch.float64)):
            if want is not None:
                assert (got - want).abs().max() <= 1e-9 * (1 + want.abs().max()), name


def test_gradients_agree_with_finite_differences():
    q, k, v, beta, bias = (x.double().requires_grad_() for x in inputs("bias", 2, 3))
    assert torch.autograd.gradcheck(with_backend("sdpa"), (q, k, v, beta, bias))


@pytest.mark.parametrize("case", ["normal", "span 0.1", "span 200", "one-channel-spike 500"])
def test_free_energy_lies_between_the_mean_and_the_largest_visible_value(case):
    q, k, v, beta, _ = inputs(case, 101, 101)
    mean, free_energy = softmax_read(q, k, v, beta)
    slack = 1e-5 * (1 + v.abs())
    assert (mean <= free_energy + slack).all()
    assert (free_energy <= v.cummax(1).values + slack).all()


@pytest.mark.parametrize("change", [1e4, -1e4, 30.0])
@pytest.mark.parametrize("backend", ["sdpa", "plain"])
def test_tokens_that_a_row_may_not_see_do_not_change_it(change, backend):
    q, k, v, beta, _ = inputs("normal", 61, 61)
    seen = 40
    before = softmax_read(q, k, v, beta, backend=backend)
    for later in (q, k, v):
        later[:, seen:] += change
    after = softmax_read(q, k, v, beta, backend=backend)
    for was, now in zip(before, after):
        assert (was - now)[:, :seen].abs().max() <= 5e-6 * (1 + v[:, :seen].abs().max())


@pytest.mark.parametrize("case", ["normal", "span 200"])
def test_a_constant_added_to_the_values_adds_to_the_free_energy(case):
    q, k, v, beta, _ = inputs(case, 31, 31, torch.float64)
    v = (v * 64).round() / 64  # exact in float32 after the addition as well
    for constant in (1.0, 1000.0):
        shifted = softmax_read(q.float(), k.float(), (v + constant).float(), beta.float()).free_energy
        wanted = naive_softmax_read(q.float(), k.float(), v, beta.float()).free_energy + constant
        assert (shifted - wanted).abs().max() <= 1e-7 * constant + 1e-5 * (1 + v.abs().max())


# Support: masking a token equals deleting it.


def grouped_inputs(time):
    q, k = torch.randn(2, time, 4, KEY), torch.randn(2, time, 2, KEY)
    return q, k, torch.randn(2, time, 2, VALUE) * 5, torch.rand(2, VALUE) + 1.5


@pytest.mark.parametrize("backend", ["sdpa", "plain", "reference"])
@pytest.mark.parametrize("options", [{}, {"window": 3}, {"causal": False}, {"causal": False, "window": 3}])
def test_masking_equals_deleting(options, backend):
    q, k, v, beta = grouped_inputs(19)
    mask = torch.rand(2, 19) > 0.4
    if "window" in options:  # which counts tokens as they stand
        mask = (torch.arange(19) >= torch.tensor([[3], [0]])) & (torch.arange(19) < torch.tensor([[19], [14]]))
    garbage = ~mask[:, :, None, None]
    q, k, v = (torch.where(garbage, 1e4 * torch.randn_like(x), x).requires_grad_() for x in (q, k, v))
    masked = softmax_read(q, k, v, beta, key_mask=mask, backend=backend, **options)
    gradients = torch.autograd.grad(sum(part[mask].square().sum() for part in masked), (q, k, v))
    assert all(gradient[~mask].abs().max() == 0 for gradient in gradients[1:])
    for row in range(2):
        kept = mask[row]
        alone = softmax_read(*(x[row : row + 1, kept] for x in (q, k, v)), beta, backend=backend, **options)
        for with_mask, without in zip(masked, alone):
            torch.testing.assert_close(with_mask[row, kept], without[0], atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("options", [{}, {"window": 3}, {"causal": False}])
def test_packed_documents_equal_separate_runs(options):
    q, k, v, beta = grouped_inputs(14)
    ids = torch.tensor([[5, 5, 5, 5, 2, 2, 2, 2, 2, 5, 5, 7, 7, 7]]).expand(2, -1)
    packed = softmax_read(q, k, v, beta, segment_ids=ids, **options)
    parts = [
        softmax_read(*(x[:, a:b] for x in (q, k, v)), beta, **options) for a, b in [(0, 4), (4, 9), (9, 11), (11, 14)]
    ]
    for whole, separate in zip(packed, zip(*parts)):
        torch.testing.assert_close(whole, torch.cat(separate, 1), atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("backend", ["sdpa", "plain"])
def test_masks_documents_window_and_bias_together_follow_the_definition(backend):
    q, k, v, beta = grouped_inputs(23)
    mask, ids = torch.rand(2, 23) > 0.3, torch.randint(0, 2, (2, 23)).cummax(1).values
    bias = torch.randn(4, 9, 23).masked_fill(torch.rand(4, 9, 23) > 0.8, -torch.inf)
    v[:, 11] += 200
    leaves = [q[:, -9:], k, v, beta, bias]
    rows = mask[:, -9:]
    found = []
    for read in (softmax_read, naive_softmax_read):
        copies = [
            x.double().requires_grad_() if read is naive_softmax_read else x.clone().requires_grad_() for x in leaves
        ]
        options = {} if read is naive_softmax_read else {"backend": backend}
        out = read(*copies[:4], window=5, bias=copies[4], key_mask=mask, segment_ids=ids, **options)
        loss = sum(part[rows].sin().sum() for part in out)
        found.append([*(part[rows] for part in out), *torch.autograd.grad(loss, copies)])
    for got, want in zip(*found):
        assert (got - want).abs().max() <= 3e-5 * (1 + want.abs().max())


@pytest.mark.parametrize("queries", [1, 4])
def test_the_last_queries_read_as_they_do_among_all(queries):
    q, k, v, beta = grouped_inputs(15)
    for options in ({}, {"window": 4}):
        whole = softmax_read(q, k, v, beta, **options)
        last = softmax_read(q[:, -queries:], k, v, beta, **options)
        for all_rows, some in zip(whole, last):
            torch.testing.assert_close(all_rows[:, -queries:], some, atol=1e-5, rtol=1e-6)


def test_cross_attention_may_have_more_queries_than_keys():
    q, k, v, beta = grouped_inputs(11)
    mask = torch.arange(7).expand(2, -1) != 2
    got = softmax_read(q, k[:, :7], v[:, :7], beta, causal=False, key_mask=mask)
    want = naive_softmax_read(q, k[:, :7], v[:, :7], beta, causal=False, key_mask=mask)
    for a, b in zip(got, want):
        assert (a - b).abs().max() < 1e-5


@pytest.mark.parametrize("backend", ["sdpa", "plain", "reference"])
@pytest.mark.parametrize("how", ["mask", "bias"])
def test_a_row_without_keys_reads_zero_and_gets_no_gradient(how, backend):
    q, k, v, beta = (x.requires_grad_() for x in grouped_inputs(9))
    empty = torch.arange(9) < 4
    options = {"key_mask": ~empty.expand(2, -1)}
    if how == "bias":
        options = {"bias": torch.zeros(9, 9).masked_fill(empty[:, None], -torch.inf).requires_grad_()}
    read = softmax_read(q, k, v, beta, backend=backend, **options)
    assert all((part[:, empty] == 0).all() for part in read)
    gradients = torch.autograd.grad(sum(part[:, empty].sum() for part in read), (q, k, v, beta), retain_graph=True)
    assert all((gradient == 0).all() for gradient in gradients)
    gradients = torch.autograd.grad(sum(part.square().sum() for part in read), (q, k, v, beta))
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("backend", ["sdpa", "plain", "reference"])
def test_without_beta_the_mean_stands_alone(backend):
    q, k, v, beta = grouped_inputs(12)
    mean, free_energy = softmax_read(q, k, v, None, backend=backend)
    assert free_energy is None
    torch.testing.assert_close(mean, softmax_read(q, k, v, beta).mean, atol=1e-5, rtol=1e-6)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    alone, together = (torch.autograd.grad(softmax_read(q, k, v, b).mean.sum(), (q, k, v)) for b in (None, beta))
    for a, b in zip(alone, together):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rows, queries", [(0, 5), (2, 0)])
def test_no_queries_read_nothing(rows, queries):
    q, k, v, beta = grouped_inputs(5)
    mean, free_energy = softmax_read(q[:rows, :queries], k[:rows], v[:rows], beta)
    assert mean.shape == free_energy.shape == (rows, queries, 4, VALUE)


@pytest.mark.parametrize("widths", [(4, 7), (14, 7), (22, 7), (1, 1)])
def test_widths_need_not_match(widths):
    key, value = widths
    q, k = torch.randn(2, 6, 3, key), torch.randn(2, 6, 3, key)
    arguments = [q, k, torch.randn(2, 6, 3, value), torch.rand(3, value) + 1, None]
    weights = [torch.randn(2, 6, 3, value) for _ in range(2)]
    wanted = results(exact, arguments, weights, torch.float64)
    for backend in ("sdpa", "plain"):
        for got, want in zip(results(with_backend(backend), arguments, weights, torch.float32), wanted):
            assert want is None or (got - want).abs().max() <= 1e-5


@settings(max_examples=25, deadline=None)
@given(
    time=st.integers(1, 12),
    scale=st.sampled_from([1e-30, 1e-3, 1.0, 1e2, 1e4]),
    scores=st.sampled_from([0.0, 1.0, 100.0]),
    beta=st.sampled_from([1e-6, 1.0, 1e3]),
    seed=st.integers(0, 99),
)
def test_finite_inputs_give_finite_reads_and_gradients(time, scale, scores, beta, seed):
    draw = lambda *shape: torch.randn(*shape, generator=torch.Generator().manual_seed(seed))  # noqa: E731
    q, k, v = draw(1, time, 2, 4) * scores, draw(1, time, 2, 4), draw(1, time, 2, 3) * scale
    leaves = [x.requires_grad_() for x in (q, k, v, torch.full((2, 3), beta))]
    mean, free_energy = softmax_read(*leaves)
    gradients = torch.autograd.grad(mean.sum() + free_energy.sum(), leaves)
    assert all(x.isfinite().all() for x in (mean, free_energy, *gradients))
    assert (mean <= free_energy + 1e-5 * (1 + v.abs().max())).all()


@pytest.mark.parametrize("queries", [1, 9])
def test_autocast_leaves_the_read_in_the_dtype_of_its_inputs(queries):
    q, k, v, beta = grouped_inputs(9)
    q = q[:, -queries:]
    for backend in ("sdpa", "plain"):
        outside = softmax_read(q, k, v, beta, backend=backend)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = softmax_read(q, k, v, beta, backend=backend)
        assert all(torch.equal(a, b) for a, b in zip(outside, inside))
    low = softmax_read(q.bfloat16(), k.bfloat16(), v.bfloat16(), beta)
    assert low.mean.dtype == low.free_energy.dtype == torch.bfloat16


@pytest.mark.parametrize("window", [sys.maxsize, 2**41, 10**30])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("documents", [None, [0, 0, 0, 1, 1, 1]])
def test_a_window_beyond_all_tokens_is_none(window, causal, documents):
    q, k, v, beta = grouped_inputs(6)
    marks = {
        "causal": causal,
        "segment_ids": None if documents is None else torch.tensor([documents]).expand(len(q), -1),
    }
    found, wanted = (softmax_read(q, k, v, beta, window=size, **marks) for size in (window, None))
    for got, read in zip(found, wanted):
        torch.testing.assert_close(got, read)


def test_recomputed_entries_are_counted_and_warned_of_once(monkeypatch):
    monkeypatch.setattr(softmax, "fallbacks", FallbackCount())
    q, k, v, beta, _ = inputs("normal", 20, 20)
    softmax_read(q, k, v, beta)
    assert (softmax.fallbacks.entries, softmax.fallbacks.recomputed) == (20 * HEADS * VALUE, 0)
    v[:, 10] += 500
    with pytest.warns(UserWarning, match="computed again"):
        softmax_read(q, k, v, beta)
    assert softmax.fallbacks.recomputed == 10 * HEADS * VALUE
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        softmax_read(q, k, v, beta)
    softmax.fallbacks.reset()
    assert (softmax.fallbacks.entries, softmax.fallbacks.recomputed) == (0, 0)


def test_hidden_keys_cause_no_recomputation(monkeypatch):
    monkeypatch.setattr(softmax, "fallbacks", FallbackCount())
    q, k, v, beta, _ = inputs("normal", 20, 20)
    v[:, :5] = 1e4
    mask = (torch.arange(20) >= 5)[None]
    softmax_read(q, k, v, beta, key_mask=mask)
    softmax_read(q, k, v, beta, bias=torch.zeros(20, 20).masked_fill(~mask, -torch.inf))
    assert softmax.fallbacks.recomputed == 0


def test_a_gradient_can_be_taken_twice():
    arguments = inputs("spike 25", 8, 8)[:4]
    leaves = [x.requires_grad_() for x in arguments]
    out = softmax_read(*leaves).free_energy.sum()
    first, second = (torch.autograd.grad(out, leaves, retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))


COMPILED = """
import sys, torch
from fem.functional import softmax_read
torch.set_num_threads(1)
def loss(q, k, v, beta, bias):
    read = softmax_read(q, k, v, beta, bias=bias)
    return (read.mean * 1.5 + read.free_energy.sin()).sum()
shapes = (2, 9, 4, 8), (2, 9, 2, 8), (2, 9, 2, 5), (2, 5), (4, 9, 9)
leaves = [torch.rand(shape).mul_(size).requires_grad_() for shape, size in zip(shapes, (1, 1, 90, 2, 1))]
compiled = torch.compile(loss, fullgraph=True, backend=sys.argv[1])
for eager, whole in zip(*(torch.autograd.grad(run(*leaves), leaves) for run in (loss, compiled))):
    torch.testing.assert_close(whole, eager, rtol=1e-4, atol=1e-5)
"""


@pytest.mark.slow
def test_forward_and_backward_are_one_graph_that_computes_the_same():
    """In a process of its own: the shape checks of these tests break graphs. Inductor needs a C++ compiler."""
    backend = "inductor" if shutil.which("g++") else "aot_eager"
    done = subprocess.run([sys.executable, "-c", COMPILED, backend], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("beta, within", [(1e-2, 1e-4), (1e-3, 1e-3)])
def test_a_small_beta_has_its_gradient(beta, within):
    exact = softmax_call(64, beta=beta).map(lambda x: x.float()).leaves(torch.float64)
    mine, weights = exact.leaves(torch.float32), torch.rand(1, 64, 2, 3)
    gradient = lambda call, read: torch.autograd.grad((read[1] * weights).sum(), call.arguments["beta"])[0]  # noqa: E731
    wanted, got = gradient(exact, exact.definition()), gradient(mine, mine.read())
    assert ((got - wanted).abs().max() / wanted.abs().max()) < within
