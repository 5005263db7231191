"""The definition of the decaying sum, in float64."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def naive_decay_scan(
    log_decay: Float[Tensor, "b t c"], u: Float[Tensor, "b t c"], initial_state: Float[Tensor, "b c"] | None = None
) -> Float[Tensor, "b t c"]:
    """h_t = exp(log_decay_t) h_{t-1} + u_t, one step after the other."""
    h = torch.zeros_like(u[:, 0]).double() if initial_state is None else initial_state.double()
    rows = []
    for t in range(u.shape[1]):
        h = log_decay[:, t].double().exp() * h + u[:, t].double()
        rows.append(h)
    return torch.stack(rows, 1)
