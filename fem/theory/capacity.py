"""How many selections a read can express, what a fixed state costs, and whether the right token was read."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fem.theory.rows import check_tensors, shown


def index_accuracy(
    prediction: Float[Tensor, "..."], values: Float[Tensor, "... t d"], winner: Int[Tensor, "..."]
) -> Float[Tensor, ""]:
    """Share of the channels, over the whole batch, whose prediction lies nearest to the winning token's value.

        a_j = argmin_i (v_ij - y_j)^2        accuracy = mean of [a_j = winner_j]                        (Appendix P)

    prediction (.., D), values (.., T, D), winner (.., D): the index of a token. Ties count as the winner's. Raises
    ValueError on mismatched shapes and on indices out of range, TypeError on other dtypes.
    """
    check_tensors(prediction=prediction, values=values)
    if values.ndim < 2 or values.shape[-2] == 0:
        raise ValueError(f"values must have shape (.., T >= 1, D), got {tuple(values.shape)}.")
    if not isinstance(winner, Tensor) or winner.is_floating_point() or winner.dtype == torch.bool:
        raise TypeError("winner must be a tensor of integers, the winning token of each channel.")
    wanted = (*values.shape[:-2], values.shape[-1])
    if tuple(prediction.shape) != wanted or tuple(winner.shape) != wanted:
        raise ValueError(
            f"prediction and winner must have the shape (.., D) of values (.., T, D), here {wanted}; "
            f"got {tuple(prediction.shape)} and {tuple(winner.shape)}."
        )
    if winner.device.type == "cpu" and not ((winner >= 0) & (winner < values.shape[-2])).all():
        raise ValueError(f"winner must name tokens from 0 to {values.shape[-2] - 1}, got {shown(winner)}.")
    distance = (values - prediction[..., None, :]).abs()
    return (distance.gather(-2, winner.long()[..., None, :])[..., 0, :] <= distance.amin(-2)).float().mean()


def argmax_patterns(weights: Float[Tensor, "contexts channels t"]) -> int:
    """How many selections the channels of a read show over a set of contexts.

        number of distinct (argmax_i w_1i, .., argmax_i w_Di)                               (Lemma 2.4, Theorem E.7)

    At most t^H for D channels that share the weights of H heads; up to t^D, all there are, for FEM's posteriors.
    """
    check_tensors(weights=weights)
    if weights.ndim != 3 or 0 in weights.shape:
        raise ValueError(
            f"weights must have shape (contexts, channels, tokens), none of them 0, got {tuple(weights.shape)}."
        )
    return weights.argmax(-1).unique(dim=0).shape[0]


def taylor_degree(radius: float, tolerance: float) -> int:
    """Degree from which on the Taylor polynomial of exp is exact to tolerance on [-radius, radius].

        smallest N with sum_{n > N} radius^n / n! <= tolerance                                        (Appendix C.1)

    radius >= 0 bounds the scores |q.k|, tolerance > 0 is absolute. Raises ValueError otherwise.
    """
    if not 0 <= radius <= 700:
        raise ValueError(f"radius must lie in [0, 700], where exp(radius) is a float64, got {radius!r}.")
    if not 0 < tolerance < math.inf:
        raise ValueError(f"tolerance must be positive and finite, got {tolerance!r}.")
    terms = [1.0]
    while len(terms) <= radius or terms[-1] > 1e-30 * tolerance:
        terms.append(terms[-1] * radius / len(terms))
    return next(n for n in range(len(terms)) if math.fsum(terms[n + 1 :]) <= tolerance)


def taylor_state(radius: float, tolerance: float, key_width: int, value_width: int) -> int:
    """Numbers in the fixed state that replaces a softmax head whose scores stay within radius.

        M (d_v + 1),    M = binomial(N + d_k, d_k)        S = sum phi(k_i) v_i^T, Z = sum phi(k_i)   (Proposition C.1)

    The kernel is exact to tolerance; the output to 4 V e^radius tolerance for |v| <= V, if e^radius tolerance <= 1/2.
    At d_k = 1 a head collapses to N + 1 numbers per value channel; the paper's examples leave out Z, the 1 in d_v + 1.
    """
    for name, width in (("key_width", key_width), ("value_width", value_width)):
        if not isinstance(width, int) or isinstance(width, bool) or width < 1:
            raise ValueError(f"{name} must be a positive integer, got {width!r}.")
    return math.comb(taylor_degree(radius, tolerance) + key_width, key_width) * (value_width + 1)
