"""The share of channels that read the right token."""

from __future__ import annotations

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
