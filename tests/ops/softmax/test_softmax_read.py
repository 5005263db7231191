"""What the softmax read promises alone: blocks of queries and keys, numbers of any size, and which calls it takes."""

import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reads import make

from fem.functional import softmax_read
from fem.ops.common.precision import fallbacks
from fem.ops.common.tokens import read_tokens
from fem.ops.softmax import attend, exact, free_energy
from fem.ops.softmax.support import Support, bounds, support

TIME = 37
MASK, IDS = torch.arange(TIME).expand(2, -1) % 5 != 3, torch.arange(TIME).expand(2, -1) // 11
RULES = {
    "causal": {},
    "full": {"causal": False},
    "window": {"window": 6},
    "window both ways": {"window": 4, "causal": False},
    "documents": {"segment_ids": IDS},
    "mask": {"key_mask": MASK},
    "all": {"segment_ids": IDS, "key_mask": MASK, "window": 6, "bias": torch.randn(4, TIME, TIME)},
    "rows without keys": {"key_mask": torch.arange(TIME).expand(2, -1) % 8 > torch.tensor([[6], [4]])},
    "forbidden": {"bias": torch.zeros(4, TIME, TIME).masked_fill(torch.rand(4, TIME, TIME) > 0.3, -torch.inf)},
}
backends = pytest.mark.parametrize("backend", ["sdpa", "plain"])
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def draw(queries=TIME, time=TIME, width=4, dtype=torch.float32):
    q, k = torch.randn(2, queries, 4, 8), torch.randn(2, time, 2, 8)
    return [x.to(dtype) for x in (q, k, torch.randn(2, time, 2, width), torch.rand(2, width) + 1.5)]


def results(arguments, rules, rows=slice(None), **how):
    """The reads of some rows, and the gradients of all arguments, a bias among them."""
    given = {"beta": None} if len(arguments) == 3 else {}
    more = [rules["bias"].to(arguments[0])] if "bias" in rules else []
    leaves = [x.clone().requires_grad_() for x in (*arguments, *more)]
    bias = {"bias": leaves[-1]} if "bias" in rules else {}
    read = softmax_read(*leaves[: len(arguments)], **given | rules | bias | how)
    parts = [x[rows] for x in read if x is not None]
    return [*parts, *torch.autograd.grad(sum(x.sin().sum() for x in parts), leaves)]


@pytest.mark.parametrize("scores", [1, 5 * TIME * 3, 1 << 17])  # 1, 3 and all heads at a time
@pytest.mark.parametrize("width", [4, 9])
@pytest.mark.parametrize("rule", RULES)
def test_heads_and_blocks_of_any_size_read_and_differentiate_as_the_definition(monkeypatch, rule, width, scores):
    """Values wider than the keys are read by our own blocks, narrower ones by attention."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    for module, name, size in ((attend, "ROWS", 5), (attend, "SCORES", scores), (free_energy, "BAND", 7)):
        monkeypatch.setattr(module, name, size)
    arguments, rules = draw(width=width, dtype=torch.float64), RULES[rule]
    rows = rules.get("key_mask", torch.ones(2, TIME).bool())
    for some in (arguments, arguments[:3]):
        found, wanted = (results(some, rules, rows, backend=name) for name in ("auto", "reference"))
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("rule", ["window", "documents", "causal"])
def test_scores_are_never_held_for_all_pairs(monkeypatch, rule):
    """Extra memory grows with T, not with its square."""
    held, restrict = [], attend._Heads.restrict
    record = lambda self, s, *how: held.append((s[0].numel(), s.numel())) or restrict(self, s, *how)  # noqa: E731
    monkeypatch.setattr(attend._Heads, "restrict", record)
    for time in (512, 2048) if rule != "causal" else (512,):
        rules = {"window": 50} if rule == "window" else {}
        rules |= {"segment_ids": torch.arange(time).expand(2, -1) // 50} if rule == "documents" else {}
        q, k, v, beta = draw(time, time, width=9)
        softmax_read(q, k, v.requires_grad_(), beta, **rules).free_energy.sum().backward()
    assert rule == "causal" or max(a for a, _ in held) <= attend.ROWS * (attend.ROWS + 2 * 50)
    assert max(b for _, b in held) <= attend.SCORES * torch.get_num_threads()
    assert len(held) > 8


def test_what_a_row_does_not_see_causes_no_recomputation(monkeypatch):
    monkeypatch.setattr(free_energy, "BAND", 8)
    q, k, v, beta = draw(64, 64)
    v[:, 0] += 500
    fallbacks.reset()
    softmax_read(q, k, v, beta, window=4)
    assert fallbacks.recomputed <= 8 * 2 * 4 * 4
    fallbacks.reset()
    mask = (torch.arange(64) > 0).expand(2, -1)
    softmax_read(q, k, v, beta, key_mask=mask)
    softmax_read(q, k, v, beta, bias=torch.zeros(64, 64).masked_fill(~mask[0], -torch.inf))
    assert fallbacks.recomputed == 0


@pytest.mark.parametrize("time", [16, TIME])
@pytest.mark.parametrize("what", [0, 1, 2], ids="qkv")
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@backends
def test_what_is_not_finite_reaches_no_other_sequence(time, what, value, backend):
    arguments = draw(time, time)
    clean = softmax_read(*arguments, backend=backend)
    arguments[what][0, time // 2, 0] = value
    leaves = [x.requires_grad_() for x in arguments]
    read = softmax_read(*leaves, backend=backend)
    torch.testing.assert_close([x[1] for x in read], [x[1] for x in clean], rtol=1e-5, atol=1e-5)
    assert all(x[1].isfinite().all() for x in torch.autograd.grad(sum(x.sum() for x in read), leaves[:3]))


@pytest.mark.parametrize("rule", ["mask", "documents", "window", "all"])
@backends
def test_what_a_row_may_not_see_never_matters(rule, backend):
    rules, arguments = RULES[rule], draw()
    kept = rules.get("key_mask", torch.ones(2, TIME).bool())
    rows, hidden = kept.clone(), ~kept
    if rule != "mask":
        hidden = torch.arange(TIME).expand(2, -1) == 12  # of the second document
        rows[:, 12 : 22 if rule != "window" else 18] = False
    clean = softmax_read(*arguments, backend=backend, **rules)
    q, k, v = (x.clone() for x in arguments[:3])
    k[hidden], v[hidden] = 1e6, 1e30
    leaves = [x.requires_grad_() for x in (q, k, v, arguments[3])]
    read = softmax_read(*leaves, backend=backend, **rules)
    torch.testing.assert_close([x[rows] for x in read], [x[rows] for x in clean], rtol=1e-5, atol=1e-5)
    assert all(x.isfinite().all() for x in torch.autograd.grad(sum(x[rows].sum() for x in read), leaves))


EXTREMES = {
    "q k below float32": (1e-30, 1e-30, 1.0, 1.0),
    "q small, k large": (1e-25, 1e25, 1.0, 1.0),
    "scores of 1000": (300.0, 10.0, 1.0, 1.0),
    "values of 1e30": (1.0, 1.0, 1e30, 1.0),
    "beta v of 1e33": (1.0, 1.0, 1e30, 1e3),
}


@pytest.mark.parametrize("case", EXTREMES)
@backends
def test_numbers_of_any_size_are_read_exactly(case, backend):
    sizes, tolerance = EXTREMES[case], 1e-3 if case == "scores of 1000" else 2e-5
    arguments, found = [x * size for x, size in zip(draw(), sizes)], []
    for dtype, name in ((torch.float32, backend), (torch.float64, "reference")):
        leaves = [x.to(dtype).requires_grad_() for x in arguments]
        out = softmax_read(*leaves, backend=name)
        found.append([*out, *torch.autograd.grad(sum(x.sum() / sizes[2] for x in out), leaves[2:])])
    assert all(x.isfinite().all() for x in found[0])
    for got, want in zip(found[0][:3], found[1][:3]):  # the definition's own dbeta is rounding error where v is large
        assert (got - want).abs().max() <= tolerance * want.abs().max()
    if sizes[2] == 1 and case != "scores of 1000":
        assert (found[0][3] - found[1][3]).abs().max() <= tolerance * (1 + found[1][3].abs().max())
    with torch.no_grad():
        one = softmax_read(arguments[0][:, -1:], *arguments[1:], backend=backend)
    for got, want in zip(one, found[1]):
        assert (got - want[:, -1:]).abs().max() <= tolerance * want.abs().max()


@pytest.mark.parametrize("queries", [0, 11])
def test_cross_attention_may_have_any_number_of_queries(queries):
    q, k, v, beta = draw(queries, 7)
    how = {"causal": False, "key_mask": torch.arange(7).expand(2, -1) != 2}
    got, want = (softmax_read(q, k, v, beta, backend=name, **how) for name in ("auto", "reference"))
    assert got.mean.shape == (2, queries, 4, 4)
    torch.testing.assert_close([*got], [x.float() for x in want], rtol=0, atol=1e-5)


@pytest.mark.parametrize("backend", ["auto", "plain", "reference"])
def test_queries_of_no_key_read_0(backend):
    call = make("softmax", 3).leaves()
    q, k, v, beta = (call.arguments[n] for n in ("q", "k", "v", "beta"))
    read = softmax_read(q, k[:, :0], v[:, :0], beta, causal=False, backend=backend)
    assert not any(part.any() for part in read)
    assert not any(x.any() for x in torch.autograd.grad(sum(x.sum() for x in read), (q, k, v, beta)))


@pytest.mark.parametrize("window", [sys.maxsize, 10**30])
@pytest.mark.parametrize("rule", ["causal", "full", "documents"])
def test_a_window_beyond_all_tokens_is_none(window, rule):
    arguments = draw()
    reads = [softmax_read(*arguments, window=size, **RULES[rule]) for size in (window, None)]
    torch.testing.assert_close(*reads)


@pytest.mark.parametrize("numbers", [exact._NUMBERS, 3 * 2 * 9])
@pytest.mark.parametrize("shape", [(2, 4, 9, 9), (1, 4, 1, 9), (1, 1, 9, 1), (2, 1, 1, 1)])
def test_entries_in_doubt_have_the_values_and_gradients_of_the_definition(monkeypatch, shape, numbers):
    """All rows of a head at once or three, where heads have unequally many rows and channels."""
    monkeypatch.setattr(exact, "_NUMBERS", numbers)
    bias, weight = torch.randn(shape), torch.randn(2, 9, 4, 4)
    doubt = torch.rand(2, 9, 4, 4) < torch.tensor([0.0, 0.02, 0.3, 0.9])[:, None]
    leaves = [x.double().requires_grad_() for x in (*draw(9, 9), bias)]
    rules = Support(True, 8**-0.5, bias=leaves[4])
    given = torch.randn(2, 9, 4, 4).double().requires_grad_()
    found = exact.exact_where(doubt, given, *leaves[:4], rules)
    wanted = softmax_read(*leaves[:4], bias=leaves[4], backend="reference").free_energy
    torch.testing.assert_close(found[doubt], wanted[doubt], rtol=1e-9, atol=1e-9)
    assert torch.equal(found[~doubt], given[~doubt])
    both = [torch.autograd.grad((x * weight)[doubt].sum(), leaves, retain_graph=True) for x in (found, wanted)]
    torch.testing.assert_close(*both, rtol=1e-8, atol=1e-8)
    (through,) = torch.autograd.grad((found * weight).sum(), given)
    assert torch.equal(through, weight.double().masked_fill(doubt, 0))
    first, end = bounds(rules, 9, 9, torch.device("cpu"))
    inputs = (given, leaves[0] * 8**-0.5, *leaves[1:4], None, first, end, leaves[4])
    for some in (doubt, torch.zeros_like(doubt)):
        of_op = (some, *(None if x is None else x.detach() for x in inputs))
        torch.library.opcheck(exact._in_graphs, of_op, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("top", [400.0, 800.0, 1000.0, 1700.0])
def test_second_derivatives_of_values_hundreds_of_nats_apart_are_finite(top):
    """The first token's weight e^{beta (f - c)} is a number of float64 whose square may be none."""
    v = torch.tensor([0.0, top / 2, top]).view(1, 3, 1, 1).requires_grad_()
    q, beta, results = torch.zeros(1, 3, 1, 1), torch.ones(1, 1), []
    for backend in ("auto", "reference"):
        read = softmax_read(q, q, v, beta, backend=backend).free_energy
        (first,) = torch.autograd.grad(read.sum(), v, create_graph=True)
        results.append(torch.autograd.grad(first.square().sum(), v)[0])
    torch.testing.assert_close(*results)


def test_the_ops_are_what_they_say_they_are():
    q, k, v, beta = draw(9, 9)
    keep, first = torch.ones(2, 9, dtype=torch.bool), torch.zeros(1, 9, dtype=torch.int32)
    end = torch.arange(1, 10, dtype=torch.int32)[None]
    checks = ("test_schema", "test_faketensor")
    for f, of_f in ((None, beta), (torch.randn(2, 9, 2, 3), torch.ones(2, 3)), (v[..., :0], torch.ones(2, 0))):
        for seen in ((None, None), (first, end)):
            how = (q, k, v, f, of_f, seen[0] is None, 0.3, keep, *seen, None, True)
            torch.library.opcheck(free_energy._read_forward, how, test_utils=checks)
            out, energies, lse, _ = free_energy._read_forward(*how)
            grads = torch.randn(2, 9, 4, 4), torch.randn_like(energies)
            torch.library.opcheck(free_energy._read_backward, (*grads, *how, out, lse, False), test_utils=checks)


def supports(keep, ids, causal, window):
    """Whether token t sees token i. A masked token belongs to the document of the kept one before it."""
    document, last, number = [], None, 0
    for i, kept in enumerate(keep):
        if kept:
            if ids is not None and last is not None and ids[i] != last:
                number += 1
            last = None if ids is None else ids[i]
        document.append(number)

    def sees(t: int, i: int) -> bool:
        together = ids is None or document[i] == document[t]
        near = window is None or abs(t - i) < window
        return keep[i] and (i <= t or not causal) and together and near

    return sees


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_who_sees_whom_is_what_a_loop_over_the_rules_says(data):
    batch, keys, cpu = 2, data.draw(st.integers(1, 12)), torch.device("cpu")
    queries, causal = data.draw(st.integers(1, keys)), data.draw(st.booleans())
    window = data.draw(st.none() | st.integers(1, 6))
    marks = lambda most: torch.tensor(data.draw(st.lists(st.integers(0, most), min_size=2 * keys, max_size=2 * keys)))  # noqa: E731
    mask = marks(1).view(batch, keys) if data.draw(st.booleans()) else None
    ids = marks(2).view(batch, keys) if data.draw(st.booleans()) else None
    tokens, _ = read_tokens((batch, keys), cpu, mask, ids)
    rules = support(queries, keys, cpu, causal, 1.0, window, None, tokens)
    table = rules.visible(queries, keys, cpu)
    assert torch.equal(*torch.broadcast_tensors(rules.sees(queries, keys, cpu), table.any(-1)))  # found without a table
    seen = table[:, 0].expand(batch, queries, -1)
    for row in range(batch):
        keep = [True] * keys if mask is None else mask[row].bool().tolist()
        sees = supports(keep, None if ids is None else ids[row].tolist(), causal, window)
        want = torch.tensor([[sees(t, i) for i in range(keys)] for t in range(keys - queries, keys)])
        rows = torch.tensor(keep)[keys - queries :]  # a masked query may see anything
        assert torch.equal(seen[row][rows], want[rows])
    for bound in bounds(rules, queries, keys, cpu):
        assert (bound.diff(dim=1) >= 0).all()
    bands = list(rules.bands(queries, keys, 3))
    assert [t for rows, _, _ in bands for t in range(queries)[rows]] == list(range(queries))
    for rows, columns, inside in bands:
        size = rows.stop - rows.start, columns.stop - columns.start
        part = inside.visible(*size, cpu)[:, 0].expand(batch, -1, -1)
        assert torch.equal(part, seen[:, rows, columns])
        assert seen[:, rows].sum() == part.sum()
