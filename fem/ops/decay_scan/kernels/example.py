"""The example by which a card's kernels of the decaying sum are checked."""

from __future__ import annotations

from fem.ops.common.self_check import TOKENS, Example
from fem.ops.decay_scan.read import decay_scan


def example(uniform) -> Example:
    tokens = {"log_decay": -0.1 * uniform(2, TOKENS, 66), "u": 2 * uniform(2, TOKENS, 66) - 1}

    def read(backend, inputs):
        return [decay_scan(inputs["log_decay"], inputs["u"], inputs["start"], backend)]

    return Example(tokens, {"start": uniform(2, 66)}, read)
