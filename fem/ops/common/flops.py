"""Floating-point operations of the reads' matrix products, for torch's FlopCounterMode, which sees none inside an op.

As it counts attention: every pair of tokens, seen or not. Linear attention counts as its recurrence, whose products a
chunked scan does in another order. A scan channel by channel has no matrix products, and nothing else is counted.
"""

from __future__ import annotations

from collections.abc import Sequence

Shape = Sequence[int]


def softmax(q: Shape, k: Shape, v: Shape, f: Shape | None, beta: Shape, *others, **kwargs) -> int:
    """Of q k^T and p [v | e]."""
    return 2 * _pairs(q, k) * (q[3] + v[3] + beta[1])


def softmax_backward(_, __, q: Shape, k: Shape, v: Shape, f: Shape | None, beta: Shape, *others, **kwargs) -> int:
    """Of the scores once more, and of the gradients of p, [v | e], q and k."""
    return 2 * _pairs(q, k) * (3 * q[3] + 2 * (v[3] + beta[1]))


def linear_attention(q: Shape, k: Shape, v: Shape, free: Shape | None, beta: Shape | None, *others, **kwargs) -> int:
    """Of S_t = S_{t-1} + k_t^T [v_t | e_t] and q_t S_t."""
    batch, time, heads, width = q
    return 4 * batch * time * heads * width * (v[3] + (0 if beta is None else beta[1]))


def linear_attention_backward(
    _, q: Shape, k: Shape, v: Shape, free: Shape | None, beta: Shape | None, *others, **kwargs
) -> int:
    """Of the two gradients of each of the two products."""
    return 2 * linear_attention(q, k, v, free, beta)


def _pairs(q: Shape, k: Shape) -> int:
    return q[0] * q[2] * q[1] * k[1]
