"""Models that pool a bag into one vector: mean, maximum, log-sum-exp, attention, and FreeEnergyPooling."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from fem.gates import Temperature
from fem.mixer import FreeEnergyMixerConfig
from fem.mlp import SwiGLU
from fem.pooling import FreeEnergyPooling
from fem_research.common.blocks import EPS, Residual, count_parameters, initialise, narrowed

ATTENTION = {"use_temperature": False, "use_lse": False, "use_outer_gate": False}


class Mean(nn.Module):
    def forward(self, x: Float[Tensor, "b t d"], keep: Bool[Tensor, "b t"]) -> Float[Tensor, "b 1 d"]:
        return (x * keep[..., None]).sum(1, keepdim=True) / keep.sum(1)[:, None, None]


class Maximum(nn.Module):
    def forward(self, x: Float[Tensor, "b t d"], keep: Bool[Tensor, "b t"]) -> Float[Tensor, "b 1 d"]:
        return x.masked_fill(~keep[..., None], -torch.inf).amax(1, keepdim=True)


class LogSumExp(nn.Module):
    """F_j = (1 / beta_j) log mean_i exp(beta_j x_ij), with a learnt beta per channel that starts at 1.95."""

    def __init__(self, width: int):
        super().__init__()
        self.beta = Temperature(FreeEnergyMixerConfig(n_embd=width, n_head=1), (width,))

    def forward(self, x: Float[Tensor, "b t d"], keep: Bool[Tensor, "b t"]) -> Float[Tensor, "b 1 d"]:
        beta = self.beta()
        total = (beta * x).masked_fill(~keep[..., None], -torch.inf).logsumexp(1, keepdim=True)
        return (total - keep.sum(1)[:, None, None].log()) / beta


class GatedAttention(nn.Module):
    """One mean, weighted by softmax_i(w . (tanh(V x_i) * sigmoid(U x_i))): gated attention of Ilse et al., 2018."""

    def __init__(self, width: int):
        super().__init__()
        self.tanh, self.gate, self.score = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, 1)

    def forward(self, x: Float[Tensor, "b t d"], keep: Bool[Tensor, "b t"]) -> Float[Tensor, "b 1 d"]:
        score = self.score(self.tanh(x).tanh() * self.gate(x).sigmoid())
        weight = score.masked_fill(~keep[..., None], -torch.inf).softmax(1)
        return (weight * x).sum(1, keepdim=True)


def pool(name: str, width: int, heads: int) -> nn.Module:
    if name == "pool:attention":
        return FreeEnergyPooling(width, heads, **ATTENTION)
    if name.startswith("pool:fem"):
        return FreeEnergyPooling(width, heads, gate_rank=4 if name.endswith("/r4") else None)
    plain = {"pool:mean": Mean, "pool:max": Maximum}
    return plain[name]() if name in plain else {"pool:lse": LogSumExp, "pool:gated": GatedAttention}[name](width)


class BagModel(nn.Module):
    """Bags (B, T, C) of which `keep` (B, T) is there -> answers (B, 1, outputs).

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

    def forward(self, x: Float[Tensor, "b t c"], keep: Bool[Tensor, "b t"]) -> Float[Tensor, "b 1 o"]:
        encoded = x.new_zeros(*keep.shape, self.encode[0].out_features)
        encoded[keep] = self.encode(x[keep][None])[0]  # elements of all bags in one row: padding costs nothing here
        return self.answer(self.pool(encoded, keep))
