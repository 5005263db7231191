"""Values wider than the keys: their own attention on a CPU, by heads and blocks of queries."""

import pytest
import torch

from fem.functional import softmax_read
from fem.ops.softmax import wide
from fem.ops.softmax.naive import naive_softmax_read

TIME = 23
RULES = {
    "causal": {},
    "full": {"causal": False},
    "window": {"window": 6},
    "documents": {"segment_ids": torch.arange(TIME).expand(3, -1) // 9},
    "rows without keys": {"key_mask": torch.arange(TIME).expand(3, -1) % 8 > torch.tensor([[6], [4], [1]])},
    "bias": {"bias": torch.randn(4, TIME, TIME), "causal": False},
    "bias that forbids": {"bias": torch.zeros(4, TIME, TIME).masked_fill(torch.rand(4, TIME, TIME) > 0.3, -torch.inf)},
}


def draw():
    q, k = torch.randn(3, TIME, 4, 4), torch.randn(3, TIME, 2, 4)
    return [x.double() for x in (q, k, torch.randn(3, TIME, 2, 5), torch.rand(2, 5) + 1.5)]


def found(read, arguments, rows, beta=True, **rules):
    leaves = [x.clone().requires_grad_() for x in (arguments if beta else arguments[:3])]
    parts = read(*leaves, **rules) if beta else [read(*leaves, None, **rules)[0]]
    parts = [part[rows] for part in parts]
    return [*parts, *torch.autograd.grad(sum(part.sin().sum() for part in parts), leaves)]


@pytest.mark.parametrize("scores", [1, 5 * TIME * 3, 5 * TIME * 9, 1 << 17])  # 1, 3, 8 and all 12 heads at a time
@pytest.mark.parametrize("rule", RULES)
def test_heads_and_blocks_of_any_size_read_and_differentiate_as_the_definition(monkeypatch, rule, scores):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(wide, "_ROWS", 5)
    monkeypatch.setattr(wide, "_SCORES", scores)
    arguments, rules = draw(), RULES[rule]
    rows = rules.get("key_mask", torch.ones(3, TIME, dtype=torch.bool))
    for got, want in zip(
        found(softmax_read, arguments, rows, **rules), found(naive_softmax_read, arguments, rows, **rules)
    ):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    if rule == "rows without keys":
        assert all((part[:, :2] == 0).all() for part in softmax_read(*arguments, **rules))


@pytest.mark.parametrize("rule", ["causal", "full"])
def test_the_mean_alone_may_be_wider_too(rule):
    arguments, rows = draw(), torch.ones(3, TIME, dtype=torch.bool)
    both = (found(read, arguments, rows, beta=False, **RULES[rule]) for read in (softmax_read, naive_softmax_read))
    for got, want in zip(*both):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


def test_scores_beyond_those_of_a_block_are_never_held(monkeypatch):
    """Extra memory grows with T, not with its square."""
    largest = []
    restricted = wide.WideAttention._restricted
    monkeypatch.setattr(
        wide.WideAttention, "_restricted", lambda self, s, *how: largest.append(s.numel()) or restricted(self, s, *how)
    )
    q, k, v, beta = (torch.randn(2, 512, 4, width) for width in (4, 4, 5, 1))
    softmax_read(q, k, v.requires_grad_(), beta[0, 0].expand(4, 5).abs() + 1).free_energy.sum().backward()
    assert len(largest) > 8
    assert max(largest) <= wide._SCORES * torch.get_num_threads()
