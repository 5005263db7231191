"""The softmax read by blocks of queries, and what is not finite or too large: it reaches no row that it must not."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_softmax import naive_softmax_read

from fem.functional import softmax_read
from fem.ops.common.naive_rows import supports
from fem.ops.common.tokens import read_tokens
from fem.ops.softmax import attend, exact, free_energy
from fem.ops.softmax.support import bounds, support

TIME = 37
RULES = {
    "causal": {},
    "full": {"causal": False},
    "window": {"window": 6},
    "window both ways": {"window": 4, "causal": False},
    "documents": {"segment_ids": torch.arange(TIME).expand(2, -1) // 11},
    "mask": {"key_mask": torch.arange(TIME).expand(2, -1) % 5 != 3},
    "all": {
        "segment_ids": torch.stack([torch.arange(TIME) // 11, torch.arange(TIME) // 17]),
        "key_mask": torch.arange(TIME).expand(2, -1) % 5 != 3,
        "window": 6,
        "bias": torch.randn(4, TIME, TIME),
    },
}
backends = pytest.mark.parametrize("backend", ["sdpa", "plain"])
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def draw(queries=TIME, time=TIME, dtype=torch.float32):
    q, k = torch.randn(2, queries, 4, 8), torch.randn(2, time, 2, 8)
    return [x.to(dtype) for x in (q, k, torch.randn(2, time, 2, 4), torch.rand(2, 4) + 1.5)]


@pytest.mark.parametrize("rule", [name for name in RULES if name not in ("causal", "full", "mask")])
@backends
def test_blocks_of_any_size_read_and_differentiate_as_the_definition(monkeypatch, rule, backend):
    monkeypatch.setattr(attend, "ROWS", 5)
    monkeypatch.setattr(free_energy, "BAND", 7)
    found = []
    arguments, rules = draw(), dict(RULES[rule])
    rows = torch.ones(2, TIME, dtype=torch.bool) if "key_mask" not in rules else rules["key_mask"]
    for read in (softmax_read, naive_softmax_read):
        leaves = [
            x.detach().double().requires_grad_() for x in (*arguments, *([rules["bias"]] if "bias" in rules else []))
        ]
        how = {} if read is naive_softmax_read else {"backend": backend}
        out = read(*leaves[:4], **rules | how | ({"bias": leaves[4]} if "bias" in rules else {}))
        gradients = torch.autograd.grad(sum(x[rows].sin().sum() for x in out), leaves)
        found.append([*(x[rows] for x in out), *gradients])
    for got, want in zip(*found):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("rule", ["window", "documents"])
def test_scores_are_never_held_for_all_pairs(monkeypatch, rule):
    largest = []
    restrict = attend._Heads.restrict
    monkeypatch.setattr(
        attend._Heads, "restrict", lambda self, s, *how: largest.append(s[0].numel()) or restrict(self, s, *how)
    )
    for time in (512, 2048):
        rules = {"window": 50} if rule == "window" else {"segment_ids": torch.arange(time).expand(2, -1) // 50}
        softmax_read(*draw(time, time), **rules)
        assert max(largest) <= attend.ROWS * (attend.ROWS + 2 * 50)


@pytest.mark.parametrize("scores", [1, 5 * TIME * 3, 5 * TIME * 9, 1 << 17])  # 1, 3, 8 and all heads at a time
@pytest.mark.parametrize("rule", [*RULES, "rows without keys", "forbidden"])
def test_heads_and_blocks_of_any_size_take_values_wider_than_the_keys(monkeypatch, rule, scores):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(attend, "ROWS", 5)
    monkeypatch.setattr(attend, "SCORES", scores)
    more = {
        "rows without keys": {"key_mask": torch.arange(TIME).expand(2, -1) % 8 > torch.tensor([[6], [4]])},
        "forbidden": {"bias": torch.zeros(4, TIME, TIME).masked_fill(torch.rand(4, TIME, TIME) > 0.3, -torch.inf)},
    }
    rules, (q, k, _, _) = (RULES | more)[rule], draw(dtype=torch.float64)
    arguments = q, k, torch.randn(2, TIME, 2, 9).double(), torch.rand(2, 9).double() + 1.5
    rows = rules.get("key_mask", torch.ones(2, TIME, dtype=torch.bool))
    for both in (True, False):
        found = []
        for read in (softmax_read, naive_softmax_read):
            leaves = [x.clone().requires_grad_() for x in arguments[: 4 if both else 3]]
            parts = [x[rows] for x in (read(*leaves, **rules) if both else read(*leaves, None, **rules)[:1])]
            found.append([*parts, *torch.autograd.grad(sum(x.sin().sum() for x in parts), leaves)])
        for got, want in zip(*found):
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


def test_scores_beyond_those_of_a_block_are_never_held(monkeypatch):
    """Extra memory grows with T, not with its square."""
    largest = []
    restrict = attend._Heads.restrict
    monkeypatch.setattr(
        attend._Heads, "restrict", lambda self, s, *how: largest.append(s.numel()) or restrict(self, s, *how)
    )
    q, k, v, beta = (torch.randn(2, 512, 4, width) for width in (4, 4, 5, 1))
    softmax_read(q, k, v.requires_grad_(), beta[0, 0].expand(4, 5).abs() + 1).free_energy.sum().backward()
    assert len(largest) > 8
    assert max(largest) <= attend.SCORES * torch.get_num_threads()


def test_a_spike_outside_the_window_of_a_block_is_not_its_business(monkeypatch):
    monkeypatch.setattr(free_energy, "BAND", 8)
    q, k, v, beta = draw(64, 64)
    v[:, 0] += 500
    exact.fallbacks.reset()
    softmax_read(q, k, v, beta, window=4)
    assert exact.fallbacks.recomputed <= 8 * 2 * 4 * 4


@pytest.mark.parametrize("time", [16, TIME])
@pytest.mark.parametrize("what", ["q", "k", "v"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@backends
def test_what_is_not_finite_reaches_no_other_sequence(time, what, value, backend):
    q, k, v, beta = draw(time, time)
    clean = softmax_read(q, k, v, beta, backend=backend)
    {"q": q, "k": k, "v": v}[what][0, time // 2, 0] = value
    leaves = [x.requires_grad_() for x in (q, k, v)]
    read = softmax_read(*leaves, beta, backend=backend)
    for got, want in zip(read, clean):
        torch.testing.assert_close(got[1], want[1], rtol=1e-5, atol=1e-5)
    gradients = torch.autograd.grad(sum(x.sum() for x in read), leaves)
    assert all(x[1].isfinite().all() for x in gradients)


HIDDEN = [("mask", torch.nan), ("mask", torch.inf), *((rule, 1e30) for rule in ("mask", "documents", "window", "all"))]


@pytest.mark.parametrize(("rule", "size"), HIDDEN)
@backends
def test_what_a_row_may_not_see_never_matters(rule, size, backend):
    rules, arguments = RULES[rule], draw()
    kept = torch.ones(2, TIME, dtype=torch.bool) if "key_mask" not in rules else rules["key_mask"]
    rows = kept.clone()
    hidden = ~kept
    if rule != "mask":
        hidden = torch.zeros(2, TIME, dtype=torch.bool)
        hidden[:, 12] = True  # of the second document of eleven, the first of seventeen
        rows[:, 12 : 34 if rule != "window" else 18] = False
    clean = softmax_read(*arguments, backend=backend, **rules)
    q, k, v = (x.clone() for x in arguments[:3])
    k[hidden], v[hidden] = 1e6 if size == 1e30 else size, size
    leaves = [x.requires_grad_() for x in (q, k, v, arguments[3])]
    read = softmax_read(*leaves, backend=backend, **rules)
    for got, want in zip(read, clean):
        torch.testing.assert_close(got[rows], want[rows], rtol=1e-5, atol=1e-5)
    gradients = torch.autograd.grad(sum(x[rows].sum() for x in read), leaves)
    assert all(x.isfinite().all() for x in gradients)


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
    of_q, of_k, of_v, of_beta = EXTREMES[case]
    q, k, v, beta = draw()
    q, k, v, beta = q * of_q, k * of_k, v * of_v, beta * of_beta
    exact = [x.double() for x in (q, k, v, beta)]
    found = []
    for read, leaves in ((softmax_read, [q, k, v, beta]), (naive_softmax_read, exact)):
        leaves = [x.requires_grad_() for x in leaves]
        out = read(*leaves, **({"backend": backend} if read is softmax_read else {}))
        found.append([*out, *torch.autograd.grad(sum(x.sum() / of_v for x in out), leaves[2:])])
    assert all(x.isfinite().all() for x in found[0])
    tolerance = 1e-3 if case == "scores of 1000" else 2e-5
    for got, want in zip(found[0][:3], found[1][:3]):  # the definition's own dbeta is rounding error where v is large
        assert (got - want).abs().max() <= tolerance * want.abs().max()
    if of_v == 1 and case != "scores of 1000":
        assert (found[0][3] - found[1][3]).abs().max() <= tolerance * (1 + found[1][3].abs().max())
    with torch.no_grad():
        one = softmax_read(q[:, -1:], k, v, beta, backend=backend)
    for got, want in zip(one, found[1]):
        assert (got - want[:, -1:]).abs().max() <= tolerance * want.abs().max()


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


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_who_sees_whom_is_what_a_loop_over_the_rules_says(data):
    batch, keys = 2, data.draw(st.integers(1, 12))
    queries, causal = data.draw(st.integers(1, keys)), data.draw(st.booleans())
    window = data.draw(st.none() | st.integers(1, 6))
    draw = lambda most: torch.tensor(data.draw(st.lists(st.integers(0, most), min_size=2 * keys, max_size=2 * keys)))  # noqa: E731
    mask = draw(1).view(batch, keys) if data.draw(st.booleans()) else None
    ids = draw(2).view(batch, keys) if data.draw(st.booleans()) else None
    tokens, _ = read_tokens((batch, keys), torch.device("cpu"), mask, ids)
    rules = support(queries, keys, torch.device("cpu"), causal, 1.0, window, None, tokens)
    seen = rules.visible(queries, keys, torch.device("cpu"))[:, 0].expand(batch, queries, -1)
    for row in range(batch):
        keep = [True] * keys if mask is None else mask[row].bool().tolist()
        sees = supports(keep, None if ids is None else ids[row].tolist(), causal, window)
        want = torch.tensor([[sees(t, i) for i in range(keys)] for t in range(keys - queries, keys)])
        rows = torch.tensor(keep)[keys - queries :]  # a masked query may see anything
        assert torch.equal(seen[row][rows], want[rows])
    for bound in bounds(rules, queries, keys, torch.device("cpu")):
        assert (bound.diff(dim=1) >= 0).all()
    bands = list(rules.bands(queries, keys, 3))
    assert [t for rows, _, _ in bands for t in range(queries)[rows]] == list(range(queries))
    for rows, columns, inside in bands:
        size = rows.stop - rows.start, columns.stop - columns.start
        part = inside.visible(*size, torch.device("cpu"))[:, 0].expand(batch, -1, -1)
        assert torch.equal(part, seen[:, rows, columns])
        assert seen[:, rows].sum() == part.sum()
