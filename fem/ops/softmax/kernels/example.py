"""The example by which a card's kernels for doubtful entries of the free energy are checked."""

from __future__ import annotations

import torch

from fem.ops.common.self_check import TOKENS, Example
from fem.ops.softmax.recompute import recompute
from fem.ops.softmax.support import intervals


def example(uniform, keys: int, values: int) -> Example:
    """One entry in 2,000 of four heads, which read two key heads: causal, in a window, and with a bias."""
    tokens = {"q": 2 * uniform(2, TOKENS, 4, keys) - 1, "k": 2 * uniform(2, TOKENS, 2, keys) - 1}
    tokens["v"] = 60 * uniform(2, TOKENS, 2, values)
    doubtful = uniform(2, TOKENS, 4, values) < 1 / 2000
    bias = uniform(1, 4, TOKENS, TOKENS)

    def read(backend, inputs):
        q, k, v, beta = (inputs[name] for name in ("q", "k", "v", "beta"))
        free = torch.zeros_like(doubtful, dtype=inputs["beta"].dtype, device=q.device)
        window = intervals(TOKENS, TOKENS, False, 50, None, q.device)
        rules = (None, None, True), (None, window, False), (bias.to(free), None, False)
        return [recompute(free, doubtful.to(q.device), q, k, v, beta, *rule, keys**-0.5, backend) for rule in rules]

    return Example(tokens, {"beta": 0.5 + uniform(2, values)}, read)
