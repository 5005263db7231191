"""The softmax read by blocks of queries, and what is not finite or too large: it reaches no row that it must not."""

import pytest
import torch

from fem.functional import softmax_read
from fem.ops.softmax import op, recompute
from fem.ops.softmax.naive import naive_softmax_read

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
    monkeypatch.setattr(op, "ROWS", 5)
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
def test_a_mask_of_pairs_is_never_made_for_all_of_them(monkeypatch, rule):
    monkeypatch.setattr(op, "ROWS", 64)
    largest = []
    attend = op.Scores.attend
    monkeypatch.setattr(op.Scores, "attend", lambda self, v: largest.append(self.mask.numel()) or attend(self, v))
    for time in (512, 2048):
        q, k, v, beta = draw(time, time)
        largest.clear()
        softmax_read(
            q,
            k,
            v,
            beta,
            **({"window": 50} if rule == "window" else {"segment_ids": torch.arange(time).expand(2, -1) // 50}),
        )
        assert max(largest) <= 2 * 64 * (64 + 2 * 50)


def test_a_spike_outside_the_window_of_a_block_is_not_its_business(monkeypatch):
    monkeypatch.setattr(op, "ROWS", 8)
    q, k, v, beta = draw(64, 64)
    v[:, 0] += 500
    recompute.fallbacks.reset()
    softmax_read(q, k, v, beta, window=4)
    assert recompute.fallbacks.recomputed <= 8 * 2 * 4 * 4


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
        for by_blocks in (False, True):
            seen = (first, end) if by_blocks else (None, None)
            how = (q, k, v, f, of_f, None, keep, *seen, not by_blocks, 0.3, True)
            torch.library.opcheck(op._forward, how, test_utils=checks)
            out, free_energy, lse, _ = op._forward(*how)
            grads = torch.randn(2, 9, 4, 4), torch.randn_like(free_energy)
            torch.library.opcheck(op._backward, (*grads, *how, out, lse, False), test_utils=checks)
