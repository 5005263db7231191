"""Pools in the regimes: a bag's answers stand at its last token, which is empty."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from fem_research.common.pools import BagModel


class PoolModel(BagModel):
    """Bags (B, T, C) whose last token is empty -> answers (B, T, outputs), 0 before the last token."""

    def forward(self, x: Float[Tensor, "b t c"]) -> Float[Tensor, "b t o"]:
        whole = x.new_ones(x.shape[0], x.shape[1] - 1, dtype=bool)
        return pad(super().forward(x[:, :-1], whole), (0, 0, x.shape[1] - 1, 0))
