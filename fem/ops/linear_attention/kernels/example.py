"""The example by which a card's kernels of linear attention are checked."""

from __future__ import annotations

from fem.ops.common.self_check import TOKENS, Example
from fem.ops.linear_attention.read import linear_attention_terms


def example(uniform, keys: int, values: int, decay: str | None, free: bool) -> Example:
    """Two heads with a state to start from; decay: None, "head" or "channel"."""
    tokens = {name: 0.1 + uniform(1, TOKENS, 2, keys) for name in "qk"}
    tokens["v"] = 2 * uniform(1, TOKENS, 2, values) - 1
    exact = {"log_weight": uniform(1, 2, keys), "mean": uniform(1, 2, keys, values)}
    if decay is not None:
        exact["log_decay"] = -0.1 * uniform(*((1, TOKENS, 2) if decay == "head" else (1, TOKENS, 2, keys)))
    if free:
        exact |= {"beta": 1 + uniform(2, values), "free_energy": 0.5 + uniform(1, 2, keys, values)}

    def read(backend, inputs):
        names = ("log_weight", "mean", "free_energy")
        state = {name: inputs[name] for name in names if name in inputs}
        arguments = (inputs["q"], inputs["k"], inputs["v"], inputs.get("beta"), inputs.get("log_decay"))
        terms, state = linear_attention_terms(*arguments, initial_state=state, backend=backend)
        return [x for x in (*terms, *state.values()) if x is not None]

    return Example(tokens, exact, read)
