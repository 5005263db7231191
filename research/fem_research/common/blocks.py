"""The blocks that small experiments put around a mixer, at equal parameters; mixers of other libraries."""

from __future__ import annotations

from importlib import import_module

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fem.mixer import FreeEnergyMixer
from fem.mlp import SwiGLU
from fem_research.common.mixers import BASELINES, KNOWN_ANSWERS, PUBLISHED, mixer_config


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


def build_mixer(name: str, width: int, heads: int) -> nn.Module:
    """The mixer with this name: FEM with some of its parts, a known answer, or "fla:DeltaNet" and the like."""
    if name in KNOWN_ANSWERS:
        return {"cummax": RunningMaximum, "gru": Recurrent}[name](width)
    if name in PUBLISHED:
        return build(PUBLISHED[name], width, max(1, min(heads, width // NARROWEST_HEAD)))
    return FreeEnergyMixer(mixer_config(name, width, heads))


def mixer_blocks(mixer: str, width: int, heads: int, blocks: int, mlp_width: int) -> nn.Sequential:
    """`blocks` of [mixer, SwiGLU], with the parameters of softmax attention beside SwiGLUs of `mlp_width`.

    Raises ValueError where the mixer has more parameters than those SwiGLUs can give up.
    """
    with torch.device("meta"):
        extra = count_parameters(build_mixer(mixer, width, heads)) - count_parameters(
            build_mixer("softmax", width, heads)
        )
    inner = narrowed(mlp_width, extra, 3 * width, mixer)
    layers = (layer for _ in range(blocks) for layer in (build_mixer(mixer, width, heads), SwiGLU(width, inner)))
    return nn.Sequential(*(Residual(width, layer) for layer in layers))


def narrowed(mlp_width: int, extra: int, per_unit: int, mixer: str) -> int:
    """The width of the MLP beside a mixer with `extra` more parameters than the baseline, for equal totals.

    per_unit: the MLP's parameters per unit of its width. Raises ValueError where nothing is left of the MLP.
    """
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
    published mixer has besides linear maps, its biases included, starts as its library has it.
    """
    published = {part for layer in model.modules() if isinstance(layer, Published) for part in layer.modules()}
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear):
            own = module.weight[:, : module.in_features - getattr(module, "context", 0)]
            if initialisation == "torch":
                own.uniform_(-1, 1).div_(max(1, own.shape[1]) ** 0.5)
            else:
                own.normal_(std=getattr(module, "std", 0.02))
            if module.bias is not None and module not in published:
                nn.init.constant_(module.bias, getattr(module, "start", 0.0))
