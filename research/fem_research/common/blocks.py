"""Blocks around a mixer at equal parameters, models that pool a bag, and mixers of other libraries."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from fem.gates import Temperature
from fem.mixer import FreeEnergyMixer, FreeEnergyMixerConfig
from fem.mlp import SwiGLU
from fem.pooling import FreeEnergyPooling
from fem_research.common.diff_attention import DifferentialAttention, number_layers
from fem_research.common.hyena import Hyena, ImplicitFilter
from fem_research.common.mixers import BASELINES, KNOWN_ANSWERS, OTHERS, PUBLISHED, mixer_config


class Published(nn.Module):
    """A layer of another library: of what it returns, the first item, which is its output."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        y = self.layer(x)
        return y[0] if isinstance(y, tuple) else y


def build(name: str, width: int, heads: int) -> nn.Module:
    baseline = BASELINES[name]
    return Published(getattr(import_module(baseline.module), baseline.layer)(**baseline.arguments(width, heads)))


EPS = 1e-5
NARROWEST_HEAD = 32  # channels that the kernels of flash-linear-attention's mixers need


class Residual(nn.Module):
    """x + dropout(layer(RMSNorm(x)))"""

    def __init__(self, width: int, layer: nn.Module, dropout: float = 0.0):
        super().__init__()
        self.norm = nn.RMSNorm(width, EPS)
        self.layer = layer
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        return x + self.dropout(self.layer(self.norm(x)))


class RunningMaximum(nn.Module):
    """A linear map, the running maximum of every channel, a linear map."""

    def __init__(self, width: int):
        super().__init__()
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        return self.out(self.value(x).cummax(1).values)


class Recurrent(nn.GRU):
    """torch's GRU, as wide as the model."""

    def __init__(self, width: int):
        super().__init__(width, width, batch_first=True)

    def forward(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        return super().forward(x)[0]


class ShortConvolution(nn.Conv1d):
    """y_t = x_t + sum_j w_j * x_{t - j}, j = 0..3, or in images -1..1; every channel by itself, w from 0."""

    def __init__(self, width: int, causal: bool = True):
        taps, past = (4, 3) if causal else (3, 1)
        super().__init__(width, width, taps, padding=past, groups=width, bias=False)
        nn.init.zeros_(self.weight)

    def forward(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        return x + super().forward(x.mT)[..., : x.shape[1]].mT


def convolve(model: Any, name: str) -> Any:
    """A language or image model, if "/conv" is named with a short convolution behind the norm before every mixer."""
    for block in model.modules() if "conv" in name.split("/") else ():
        if isinstance(mixer := getattr(block, "mixer", None), FreeEnergyMixer):
            convolution = ShortConvolution(mixer.config.n_embd, mixer.config.causal)
            block.mixer_norm = nn.Sequential(block.mixer_norm, convolution)
    return model


def build_mixer(name: str, width: int, heads: int) -> nn.Module:
    """The mixer with this name: FEM with some of its parts, a known answer, another paper's, or "fla:DeltaNet" and
    the like."""
    if name in OTHERS:
        return DifferentialAttention(width, heads) if name == "DiffTrans" else Hyena(width)
    if name in KNOWN_ANSWERS:
        return {"cummax": RunningMaximum, "gru": Recurrent}[name](width)
    if name in PUBLISHED:
        return build(PUBLISHED[name], width, max(1, min(heads, width // NARROWEST_HEAD)))
    mixer = FreeEnergyMixer(mixer_config(name, width, heads))
    return nn.Sequential(ShortConvolution(width), mixer) if "conv" in name.split("/") else mixer


def mixer_blocks(
    mixer: str, width: int, heads: int, blocks: int, mlp_width: int, mlp: str = "narrowed"
) -> nn.Sequential:
    """`blocks` of [mixer, SwiGLU], with the parameters of softmax attention beside SwiGLUs of `mlp_width`; with
    mlp="kept" all SwiGLUs are so wide."""
    with torch.device("meta"):
        extra = count_parameters(build_mixer(mixer, width, heads)) - count_parameters(
            build_mixer("softmax", width, heads)
        )
    inner = mlp_width if mlp == "kept" else narrowed(mlp_width, extra, 3 * width, mixer)
    layers = (layer for _ in range(blocks) for layer in (build_mixer(mixer, width, heads), SwiGLU(width, inner)))
    return number_layers(nn.Sequential(*(Residual(width, layer) for layer in layers)))


def narrowed(mlp_width: int, extra: int, per_unit: int, mixer: str) -> int:
    """The width of the MLP (`per_unit` parameters each) beside a mixer with `extra` more than the baseline."""
    width = mlp_width - round(extra / per_unit)
    if width < 1:
        raise ValueError(
            f"{mixer} has {extra:,} parameters more than its baseline, and an MLP {mlp_width} wide has too few to make "
            f"up for them: it must be at least {mlp_width + 1 - width} wide."
        )
    return width


def count_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@torch.no_grad()
def initialise(model: nn.Module, initialisation: str) -> None:
    """Start every linear map by one rule: "normal", N(0, 0.02), or "torch", uniform within 1 / sqrt(inputs).

    Biases start at 0 or where the mixer wants them, embeddings N(0, 0.02), the conditioner's columns stay at 0; what a
    published mixer has besides linear maps, its biases included, starts as its library has it, and so do the maps that
    make Hyena's filters.
    """
    published = {part for layer in model.modules() if isinstance(layer, Published) for part in layer.modules()}
    filters = {part for layer in model.modules() if isinstance(layer, ImplicitFilter) for part in layer.modules()}
    for module in model.modules():
        if module in filters:
            continue
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear):
            weight = module.weight[:, : module.in_features - getattr(module, "context", 0)]
            if initialisation == "torch":
                weight.uniform_(-1, 1).div_(max(1, weight.shape[1]) ** 0.5)
            else:
                weight.normal_(std=getattr(module, "std", 0.02))
            if module.bias is not None and module not in published:
                nn.init.constant_(module.bias, getattr(module, "start", 0.0))


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
        return FreeEnergyPooling(width, heads, use_temperature=False, use_lse=False, use_outer_gate=False)
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
