"""The mixers that are measured, (B, T, D) -> (B, T, D), and the model of Tables 5 and 7."""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from fem.mixer import FreeEnergyMixer
from fem.ops.common.rope import rotate
from fem_research.bench.cases import BASELINE, Size
from fem_research.common import blocks
from fem_research.common.mixers import BASELINES, mixer_config
from fem_research.common.names import colour, display

PLAIN = ", plain"  # after a mixer's name: the plain backend
MIXERS = {
    "attention": "softmax",
    "FEM-SM": "softmax+CLTG",
    "FEM-SM without C": "softmax+LTG",
    "slim": "softmax+LTG/r32",
    "slim with C": "softmax+CLTG/r32",
    "split": "softmax+LTG/r32/s.5",
    "split with C": "softmax+CLTG/r32/s.5",
    "FEM-SM -G": "softmax+CLT",
    "FEM-SM -G,T": "softmax+CL",
    "FEM-SM -G,T,L": "softmax+C",
    "FEM-SM -G,T,L,C": "softmax",
    "GLA": "gla",
    "FEM-GLA": "gla+CLTG",
    "FEM-GLA without C": "gla+LTG",
    "Mamba": "mamba",
    "FEM-Mamba": "mamba+CLTG",
    "FEM-Mamba without C": "mamba+LTG",
    "FEM-AFT": "rnn_softmax+CLTG",
}
OWN_LAYER = "attention, FEM's layer"


def shown(name: str) -> str:
    """The name in tables and pictures: "FEM", "attention+LTG, plain"; "attention" is torch's own layer."""
    mixer = name.removesuffix(PLAIN)
    if mixer == "FEM-SM -G,T,L,C":
        return OWN_LAYER
    return (display(MIXERS[mixer]) if mixer in MIXERS else mixer) + name[len(mixer) :]


def colour_of(name: str) -> str:
    return colour(MIXERS.get(name, name))


class Attention(nn.Module):
    """o = W_O softmax(q k / sqrt(d)) v with RoPE, the layer that FEM replaces: 4 D^2 weights, torch's SDPA."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.output = (nn.Linear(width, width) for _ in range(4))

    def project(self, x: Float[Tensor, "b t d"], position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, (B, H, T, d) each."""
        q, k, v = (part(x).unflatten(-1, (self.heads, -1)) for part in (self.query, self.key, self.value))
        q, k = rotate(q, position, 10000.0), rotate(k, position, 10000.0)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def forward(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        position = x.new_ones(x.shape[1]).cumsum(0).long() - 1
        o = F.scaled_dot_product_attention(*self.project(x, position), is_causal=True)
        return self.output(o.transpose(1, 2).flatten(2))


def build_mixer(name: str, size: Size) -> nn.Module:
    """The mixer to measure. Raises ModuleNotFoundError where it is a baseline whose library is not installed."""
    if name == BASELINE:
        return Attention(size.width, size.heads)
    if name in BASELINES:
        return blocks.build(name, size.width, size.heads)
    mixer = name.removesuffix(PLAIN)
    return FreeEnergyMixer(
        mixer_config(MIXERS[mixer], size.width, size.heads, backend="plain" if mixer != name else "auto")
    )


class Block(nn.Module):
    """x + Mixer(LayerNorm(x)), then x + MLP(LayerNorm(x)), the MLP 4 D wide: GPT-2's block."""

    def __init__(self, width: int, mixer: nn.Module):
        super().__init__()
        self.mixer_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mixer = mixer
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        x = x + self.mixer(self.mixer_norm(x))
        return x + self.mlp(self.mlp_norm(x))


def build_blocks(name: str, size: Size, layers: int) -> nn.Sequential:
    """Blocks without embeddings and head: Table 7 counts 2 x 85M operations per token, GPT-2's blocks alone."""
    return nn.Sequential(*(Block(size.width, build_mixer(name, size)) for _ in range(layers)))
