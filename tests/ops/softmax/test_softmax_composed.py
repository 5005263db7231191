"""The GPU's path, as far as a CPU runs it: attention over [v | e], and FlexAttention forward."""

import subprocess
import sys
import warnings

import pytest
import torch

from fem.functional import softmax_read
from fem.ops.common.fallback_count import suspects
from fem.ops.common.tokens import read_tokens
from fem.ops.softmax import composed as softmax_composed
from fem.ops.softmax.support import intervals

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def draw(time, queries=None, heads=4, key_heads=2, batch=2, key=16, value=8):
    q, k = torch.randn(batch, queries or time, heads, key), torch.randn(batch, time, key_heads, key)
    return q, k, torch.randn(batch, time, key_heads, value), torch.rand(key_heads, value) + 0.5


def definition(*arguments, **rules):
    """The reads in float64, by the definition."""
    leaves = [x.detach().double().requires_grad_() for x in arguments]
    return softmax_read(*leaves, backend="reference", **rules), leaves


def composed(q, k, v, beta, *, causal=True, window=None, key_mask=None, segment_ids=None, bias=None, by_blocks=True):
    tokens = None
    if key_mask is not None or segment_ids is not None:
        tokens, _ = read_tokens(tuple(k.shape[:2]), k.device, key_mask, segment_ids)
    seen = intervals(q.shape[1], k.shape[1], causal, window, tokens, q.device) if by_blocks else None
    keep = None if tokens is None else tokens.keep
    return softmax_composed.composed_read(q, k, v, beta, bias, keep, seen, causal, q.shape[-1] ** -0.5)


def spiked(v, beta, case):
    kind, _, size = case.partition(" ")
    if kind == "span":
        return torch.rand_like(v) * float(size) / beta
    if kind == "spike":
        v = v.clone()
        v[:, v.shape[1] // 2] += float(size)
    return v + float(size) if kind == "offset" else v * float(size) if kind == "times" else v


@pytest.mark.parametrize("time", [1, 7, 131])
@pytest.mark.parametrize("case", ["normal", "span 50", "span 500", "spike 80", "offset 1000", "times 0.01"])
def test_reads_and_gradients_equal_the_definition(time, case):
    q, k, v, beta = draw(time)
    v = spiked(v, beta, case)
    leaves = [x.requires_grad_() for x in (q, k, v, beta)]
    read = composed(*leaves, by_blocks=False)
    wanted, exact = definition(*leaves)
    weights = torch.randn(2, *read.mean.shape)
    torch.autograd.backward(list(read), list(weights))
    torch.autograd.backward(list(wanted), list(weights.double()))
    largest = 1 + v.detach().abs().max()
    assert (read.mean - wanted.mean).abs().max() <= 2e-6 * largest
    assert (read.free_energy - wanted.free_energy).abs().max() <= 1e-5 * largest
    for own, other in zip(leaves, exact):
        assert (own.grad - other.grad).abs().max() <= 2e-6 * largest + 2e-5 * (1 + other.grad.abs().max())


def test_entries_that_attention_cannot_prove_are_computed_again():
    q, k, v, beta = draw(33)
    v[:, 20, :, 0] += 300
    suspects.reset()
    read = composed(q, k, v, beta, by_blocks=False)
    assert suspects.recomputed > 0
    torch.testing.assert_close(
        read.free_energy.double(), definition(q, k, v, beta)[0].free_energy, rtol=1e-5, atol=1e-4
    )


RULES = {
    "causal": {},
    "full": {"causal": False},
    "window": {"window": 5},
    "window both ways": {"window": 5, "causal": False},
    "documents": {"segment_ids": torch.arange(150).expand(2, -1) // 37},
    "padding": {"key_mask": (torch.arange(150) >= torch.tensor([[40], [0]])).long()},
    "padding and documents": {
        "key_mask": (torch.arange(150) >= torch.tensor([[40], [3]])).long(),
        "segment_ids": torch.arange(150).expand(2, -1) // 50,
        "window": 20,
    },
    "bias of a key": {"bias": torch.randn(1, 4, 1, 150)},
    "bias of a pair": {"bias": torch.randn(2, 1, 150, 150)},
    "padding and a bias": {
        "key_mask": (torch.arange(150) % 7 > 0).long().expand(2, -1),
        "bias": torch.randn(1, 4, 150, 150),
    },
}


@pytest.mark.parametrize("rule", RULES)
@torch.no_grad()
def test_flex_attention_sees_what_a_row_may_see(rule):
    arguments, rules = draw(150), RULES[rule]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        read = composed(*arguments, **rules)
    wanted, _ = definition(*arguments, **rules)
    kept = torch.ones(2, 150, dtype=torch.bool) if "key_mask" not in rules else rules["key_mask"].bool()
    for own, other in zip(read, wanted):
        torch.testing.assert_close(own[kept].double(), other[kept], rtol=1e-5, atol=2e-6)


@torch.no_grad()
def test_a_row_without_keys_reads_0_and_hidden_values_do_not_matter():
    q, k, v, beta = draw(9)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0] = 0
    mask[1, 4] = 0
    v[1, 4], v[0, 3] = 1e30, -1e30
    read = composed(q, k, v, beta, key_mask=mask)
    assert read.mean[0].eq(0).all()
    assert read.free_energy[0].eq(0).all()
    v[1, 4] = 0
    torch.testing.assert_close(read, composed(q, k, v, beta, key_mask=mask), rtol=0, atol=0)


@torch.no_grad()
def test_blocks_hold_every_key_that_a_row_sees_and_whole_ones_no_other():
    tokens, _ = read_tokens((2, 700), torch.device("cpu"), None, torch.arange(700).expand(2, -1) // 300)
    seen = intervals(700, 700, True, 200, tokens, torch.device("cpu"))
    mask, allowed = softmax_composed.block_mask(seen, 700), seen.allowed(700)
    tile = softmax_composed._TILE
    for b in range(2):
        for row in range(-(-700 // tile)):
            count, full = mask.kv_num_blocks[b, 0, row], mask.full_kv_num_blocks[b, 0, row]
            some, whole = mask.kv_indices[b, 0, row, :count], mask.full_kv_indices[b, 0, row, :full]
            for block in range(-(-700 // tile)):
                own = allowed[b, row * tile : (row + 1) * tile, block * tile : (block + 1) * tile]
                assert (block in whole) == bool(own.all() and own.shape[1] == tile)
                assert (block in some) or (block in whole) or not own.any()


@torch.no_grad()
def test_a_later_token_does_not_move_an_earlier_row():
    q, k, v, beta = draw(40)
    before = composed(q, k, v, beta, by_blocks=False)
    v[:, 30:] += 11
    after = composed(q, k, v, beta, by_blocks=False)
    for own, other in zip(after, before):
        torch.testing.assert_close(own[:, :30], other[:, :30], rtol=0, atol=5e-6)


def test_bfloat16_keeps_its_digits():
    q, k, v, beta = draw(64)
    q, k, v = (x.bfloat16() for x in (q, k, v))
    read = composed(q, k, v, beta, by_blocks=False)
    wanted, _ = definition(q, k, v, beta)
    assert read.free_energy.dtype == torch.float32
    assert ((read.free_energy - wanted.free_energy) * beta.repeat_interleave(2, 0)).abs().max() <= 1.6e-2


SCRIPT = """
import torch
from fem.ops.softmax.composed import composed_read
torch.manual_seed(0)
torch.set_num_threads(1)
read = lambda *x: composed_read(*x, None, None, None, True, 0.3)
compiled = torch.compile(read, backend="aot_eager", fullgraph=True)
for spike in (0.0, 300.0):
    q, k, v = torch.randn(2, 24, 4, 8), torch.randn(2, 24, 2, 8), torch.randn(2, 24, 2, 4)
    v[:, 12, :, 0] += spike
    results = []
    for function in (read, compiled):
        leaves = [x.clone().requires_grad_() for x in (q, k, v, torch.full((2, 4), 1.5))]
        mean, free_energy = function(*leaves)
        (mean.square().sum() + free_energy.square().sum()).backward()
        results.append([mean, free_energy, *(x.grad for x in leaves)])
    for eager, whole in zip(*results):
        torch.testing.assert_close(whole, eager, rtol=1e-5, atol=1e-5 * (1 + spike))
print("whole")
"""


def test_prologue_attention_and_epilogue_are_one_graph():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.stdout == "whole\n", done.stderr[-2000:]
