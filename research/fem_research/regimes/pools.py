"""Models that pool a bag into one vector: mean, maximum, log-sum-exp, attention, and FreeEnergyPooling."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fem.gates import Temperature
from fem.mixer import FreeEnergyMixerConfig
from fem.mlp import SwiGLU
from fem.pooling import FreeEnergyPooling
from fem_research.common.blocks import EPS, Residual, count_parameters, initialise, narrowed

ATTENTION = {"use_temperature": False, "use_lse": False, "use_outer_gate": False}


class Mean(nn.Module):
    def forward(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b 1 d"]:
        return x.mean(1, keepdim=True)


class Maximum(nn.Module):
    def forward(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b 1 d"]:
        return x.amax(1, keepdim=True)


class LogSumExp(nn.Module):
    """F_j = (1 / beta_j) log mean_i exp(beta_j x_ij), with a learnt beta per channel that starts at 1.95."""

    def __init__(self, width: int):
        super().__init__()
        self.beta = Temperature(FreeEnergyMixerConfig(n_embd=width, n_head=1), (width,))

    def forward(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b 1 d"]:
        beta = self.beta()
        return ((beta * x).logsumexp(1, keepdim=True) - math.log(x.shape[1])) / beta


def pool(name: str, width: int, heads: int) -> nn.Module:
    if name == "pool:attention":
        return FreeEnergyPooling(width, heads, **ATTENTION)
    if name.startswith("pool:fem"):
        return FreeEnergyPooling(width, heads, gate_rank=4 if name.endswith("/r4") else None)
    return {"pool:mean": Mean, "pool:max": Maximum}[name]() if name != "pool:lse" else LogSumExp(width)


class PoolModel(nn.Module):
    """Bags (B, T, C) whose last token is empty -> answers (B, T, outputs), 0 before the last token.

    A linear map and a SwiGLU encode every element, the pool makes one vector of them, and another SwiGLU and a linear
    map answer. All models have as many parameters as the one with attention pooling, by the widths of their SwiGLUs.
    """

    def __init__(self, channels: int, outputs: int, name: str, width: int, heads: int, mlp: int, initialisation: str):
        super().__init__()
        own, attention = (count_parameters(pool(one, width, heads)) for one in (name, "pool:attention"))
        inner = narrowed(mlp, own - attention, 6 * width, name)
        self.encode = nn.Sequential(
            nn.Linear(channels, width), Residual(width, SwiGLU(width, inner)), nn.RMSNorm(width, EPS)
        )
        self.pool = pool(name, width, heads)
        self.answer = nn.Sequential(
            Residual(width, SwiGLU(width, inner)), nn.RMSNorm(width, EPS), nn.Linear(width, outputs)
        )
        initialise(self, initialisation)

    def forward(self, x: Float[Tensor, "b t c"]) -> Float[Tensor, "b t o"]:
        answers = self.answer(self.pool(self.encode(x[:, :-1])))
        return torch.cat([answers.new_zeros(*x.shape[:2], answers.shape[-1])[:, 1:], answers], 1)
