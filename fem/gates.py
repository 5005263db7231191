"""The learnt scalars of a read: its temperature beta, the inner gate lambda and the outer gate g."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from fem.config import FreeEnergyMixerConfig
from fem.ops.common.gated_read import gated_read, outer_gate
from fem.ops.common.precision import wide
from fem.ops.common.read import Read
from fem.projection import Projection


class Temperature(nn.Module):
    """beta = softplus(theta + beta_max_init), theta starting at 0: the inverse temperature per channel, in nats per
    unit of v.                                                                                     (Section 2.3.2)
    """

    def __init__(self, config: FreeEnergyMixerConfig, shape: tuple[int, ...]):
        super().__init__()
        self.start = config.beta_max_init
        self.theta = nn.Parameter(torch.empty(shape))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.theta)

    def forward(self) -> Tensor:
        return F.softplus(wide(self.theta) + self.start)


class TwoLevelGate(nn.Module):
    """o_t = g_t * ((1 - lambda_t) mean_t + lambda_t F_t)                                              (Eq. 10, 11)

        lambda = sigmoid(W_lambda x)           g = RMSNorm_per_head(softplus(W_g x))

    Without temperature learning the read stands alone: F where the log-sum-exp is on, else the mean.
    """

    def __init__(self, config: FreeEnergyMixerConfig):
        super().__init__()
        self.config = config
        sizes = (config.n_embd, config.fem_dim, config.bias, config.context_width)
        self.inner = Projection(*sizes, start=config.lambda_init) if config.use_temperature else None
        self.outer = Projection(*sizes) if config.use_outer_gate else None

    def logits(self, features: Float[Tensor, "b t f"]) -> tuple[Tensor | None, Tensor | None]:
        split = lambda gate: None if gate is None else gate(features).unflatten(-1, (self.config.n_head, -1))  # noqa: E731
        return split(self.inner), split(self.outer)

    def factors(self, features: Float[Tensor, "b t f"]) -> tuple[Tensor | None, Tensor | None]:
        """lambda and g themselves, (B, T, H, d_v) each; None where the part is off."""
        inner, outer = self.logits(features)
        return None if inner is None else inner.sigmoid(), None if outer is None else outer_gate(outer, self.config.eps)

    def forward(self, features: Float[Tensor, "b t f"], read: Read) -> Float[Tensor, "b t h d"]:
        inner, outer = self.logits(features)
        return gated_read(read.mean, read.free_energy, inner, outer, self.config.eps)
