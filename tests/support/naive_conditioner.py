"""The definition of the conditioner, in float64."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def naive_conditioner(
    projected: Float[Tensor, "b t three_c"],
    weight: Float[Tensor, " c"],
    bias: Float[Tensor, " c"],
    keep: Bool[Tensor, "b t"] | None = None,
    start: Bool[Tensor, "b t"] | None = None,
    hidden: Float[Tensor, "b c"] | None = None,
    eps: float = 1e-5,
    form: str = "scaled",
) -> tuple[Float[Tensor, "b t c"], Float[Tensor, "b c"]]:
    """h_t = SiLU(y) (weight (h~_t - mean) / sqrt(variance + eps) + bias),    y = sqrt(C) l2norm(log(1 + e^a))
    h~_t = h~_{t-1} / (1 + e^f) + u_t, u_t alone where a document starts, h~_{t-1} for a masked token; and h~_T

    form: "paper", y without sqrt(C), or "authors", y in place of SiLU(y).
    """
    f, u, a = projected.double().chunk(3, -1)
    state = torch.zeros_like(u[:, 0]) if hidden is None else hidden.double()
    rows = []
    for t in range(u.shape[1]):
        after = state / (1 + f[:, t].exp()) + u[:, t]
        if start is not None:
            after = torch.where(start[:, t, None], u[:, t], after)
        state = after if keep is None else torch.where(keep[:, t, None], after, state)
        s = a[:, t].exp().log1p()
        y = s / (s * s).sum(-1, keepdim=True).sqrt().clamp_min(1e-12) * (1 if form == "paper" else s.shape[-1] ** 0.5)
        centred = state - state.mean(-1, keepdim=True)
        normed = centred / ((centred * centred).mean(-1, keepdim=True) + eps).sqrt()
        gate = y if form == "authors" else y / (1 + (-y).exp())
        rows.append(gate * (weight.double() * normed + bias.double()))
    return torch.stack(rows, 1), state
