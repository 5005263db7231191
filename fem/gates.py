"""The learnt scalars of a read: its temperature beta, the inner gate lambda and the outer gate g."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from fem.config import FreeEnergyMixerConfig
from fem.ops.common.precision import upcast
from fem.ops.common.read import Read
from fem.optim import mark_undecayed
from fem.projection import Projection


class Temperature(nn.Module):
    """beta = softplus(theta + beta_max_init), theta starting at 0: the inverse temperature per channel, in nats per
    unit of v.                                                                                     (Section 2.3.2)
    """

    undecayed = ("theta",)

    def __init__(self, config: FreeEnergyMixerConfig, shape: tuple[int, ...]):
        super().__init__()
        self.start = config.beta_max_init
        self.theta = nn.Parameter(torch.empty(shape))
        self.reset_parameters()
        mark_undecayed(self)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.theta)

    def forward(self) -> Tensor:
        return F.softplus(upcast(self.theta) + self.start)


class SlimProjection(nn.Module):
    """y = U (W x + W_c h) + b, U (width x rank): a map of low rank, which starts as spread as a full one.

    Where a model is split by heads over devices, U is split by its rows and W is whole on each.
    """

    def __init__(self, inputs: int, rank: int, width: int, bias: bool, context: int, start: float = 0.0):
        super().__init__()
        self.down = Projection(inputs, rank, bias=False, context=context)
        self.up = Projection(rank, width, bias, start=start, std=rank**-0.5)

    def forward(self, features: Float[Tensor, "*t f"]) -> Float[Tensor, "*t d"]:
        return self.up(self.down(features))


class TwoLevelGate(nn.Module):
    """o_t = g_t * ((1 - lambda_t) mean_t + lambda_t F_t)                                              (Eq. 10, 11)

        lambda = sigmoid(W_lambda x)           g = RMSNorm_per_head(softplus(W_g x))

    Without temperature learning the read stands alone: F where the log-sum-exp is on, else the mean. Slim gates
    (`gate_rank`): W_lambda and W_g are products of two maps, or give one number per head; a norm over a head would
    undo that number, so g is then softplus(W_g x) / log 2.
    """

    def __init__(self, config: FreeEnergyMixerConfig):
        super().__init__()
        self.config = config
        self.per_head = config.gate_rank == 0
        self.inner = self._map(config.lambda_init) if config.learns_lambda else None
        self.outer = self._map(0.0) if config.use_outer_gate else None

    def _map(self, start: float) -> Projection | SlimProjection:
        config = self.config
        if config.gate_rank:
            sizes = (config.n_embd, config.gate_rank, config.fem_dim)
            return SlimProjection(*sizes, config.bias, config.context_width, start)
        width = config.n_head if self.per_head else config.fem_dim
        return Projection(config.n_embd, width, config.bias, config.context_width, start)

    def ignore_features(self) -> None:
        """Start with lambda = sigmoid(lambda_init) and g = 1 for every token.

        The weights start N(0, 1e-7) and not at 0, as DoRA divides by the norms of their rows.
        """
        for gate in (self.inner, self.outer):
            if gate is not None:
                nn.init.normal_(gate.up.weight if isinstance(gate, SlimProjection) else gate.weight, std=1e-7)

    def forward(self, features: Float[Tensor, "*t f"]) -> tuple[Tensor | None, Tensor | None]:
        """lambda and g, (.., H, d_v) each, or (.., H, 1) of one number per head; None where the part is off."""
        config = self.config
        width = 1 if self.per_head else config.value_width
        split = lambda gate: upcast(torch.unflatten(gate(features), -1, (-1, width)))  # noqa: E731
        lambda_ = None if self.inner is None else split(self.inner).sigmoid()
        if self.outer is None:
            return lambda_, None
        g = F.softplus(split(self.outer))
        if self.per_head:
            return lambda_, g / math.log(2)
        return lambda_, g * torch.rsqrt(g.square().mean(-1, keepdim=True) + config.eps)

    def mixed(self, features: Float[Tensor, "*t f"], read: Read) -> Float[Tensor, "*t h d"]:
        """o = g ((1 - lambda) mean + lambda F).                                                          (Eq. 11)"""
        lambda_, g = self(features)
        u = self.mix(read, lambda_)
        return u if g is None else g.to(u.dtype) * u

    def mix(self, read: Read, lambda_: Tensor | None) -> Float[Tensor, "*t h d"]:
        """u = (1 - lambda) mean + lambda F; of split values [mean, F]; else F, or the mean without it.       (Eq. 7)"""
        mean, free_energy = read
        if free_energy is None:
            return mean
        if self.config.free_share is not None:
            return torch.cat([mean, free_energy], -1)
        return free_energy if lambda_ is None else torch.lerp(mean, free_energy, lambda_.to(mean.dtype))
