"""The example by which a card's kernels of the state space scan are checked."""

from __future__ import annotations

from fem.ops.common.precision import upcast
from fem.ops.common.self_check import TOKENS, Example
from fem.ops.ssm.read import ssm_terms


def example(uniform, rank: int, free: bool) -> Example:
    """Two rows of 34 channels, read both ways, with the present token and without, and by logarithms of the weights."""
    heads, width = 2, 17
    tokens = {"delta": 0.1 + uniform(2, TOKENS, heads, width), "v": 2 * uniform(2, TOKENS, heads, width) - 1}
    tokens |= {name: 0.1 + uniform(2, TOKENS, rank) for name in "BC"}
    exact = {"A": -0.1 - uniform(heads, width, rank), "D": 0.1 + uniform(heads, width)}
    if free:
        exact["beta"] = 1 + uniform(heads, width)

    def read(backend, inputs):
        arguments = (*(inputs[name] for name in ("delta", "A", "B", "C", "D", "v")), inputs.get("beta"))
        terms, state = ssm_terms(*arguments, return_state=True, backend=backend)
        both, _ = ssm_terms(*arguments, initial_state=state, return_state=True, backend=backend)
        ways, _ = ssm_terms(*arguments, causal=False, backend=backend)
        logs = tuple(upcast(inputs[name]).log() for name in ("delta", "B", "C"))
        by_logs, _ = ssm_terms(*arguments, backend=backend, logs=logs)
        return [x for x in (*terms, *both, *ways, *by_logs) if x is not None]

    return Example(tokens, exact, read)
