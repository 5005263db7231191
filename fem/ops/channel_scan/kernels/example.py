"""The example by which a card's kernels of the channel scan are checked."""

from __future__ import annotations

from fem.ops.channel_scan.read import channel_scan_terms
from fem.ops.common.self_check import TOKENS, Example


def example(uniform, weighted: bool, decays: bool, free: bool) -> Example:
    """Two rows of 66 channels; with a weight per token, with decays, with a beta."""
    shape = (2, TOKENS, 2, 33)
    tokens, exact = {"v": 2 * uniform(*shape) - 1}, {}
    if weighted:
        tokens["log_weight"] = 4 * uniform(*shape) - 2
    if decays:
        tokens["log_decay"] = -0.1 * uniform(*shape)
    if free:
        exact["beta"] = 1 + uniform(*shape[2:])

    def read(backend, inputs):
        arguments = (inputs.get("log_weight"), inputs["v"], inputs.get("beta"), inputs.get("log_decay"))
        terms, state = channel_scan_terms(*arguments, backend=backend)
        again, _ = channel_scan_terms(*arguments, initial_state=state, backend=backend)
        return [x for x in (*terms, *again) if x is not None]

    return Example(tokens, exact, read)
