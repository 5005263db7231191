"""The model around a mixer: two blocks of [mixer, SwiGLU], and what a task needs before and behind them."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from fem.experiments.common.baselines import build
from fem.experiments.common.blocks import EPS, Residual, SwiGLU, initialise
from fem.experiments.common.mixers import PUBLISHED, mixer_config
from fem.experiments.mad.settings import Training
from fem.mixer import FreeEnergyMixer

NARROWEST = 32  # channels of a head that the kernels of published mixers take


class LanguageBackbone(nn.Module):
    """Tokens (B, T) -> logits (B, T, V): embedding, blocks, norm, head."""

    def __init__(self, vocab_size: int, width: int, blocks: nn.Sequential):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.blocks = blocks
        self.head = nn.Sequential(nn.RMSNorm(width, EPS), nn.Linear(width, vocab_size))

    def forward(self, tokens: Int[Tensor, "b t"]) -> Float[Tensor, "b t v"]:
        return self.head(self.blocks(self.embedding(tokens)))


class AutoEncoderBackbone(nn.Module):
    """Tokens (B, T) -> logits (B, T, V), all from the last position's state h: logits_t = head(decode(h + pos_t))."""

    def __init__(self, vocab_size: int, width: int, blocks: nn.Sequential):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.blocks = blocks
        norm = lambda: nn.RMSNorm(width, EPS)  # noqa: E731
        linear = lambda: nn.Linear(width, width)  # noqa: E731
        self.decode = nn.Sequential(norm(), linear(), nn.GELU(), norm(), linear(), nn.GELU())
        self.head = nn.Sequential(norm(), nn.Linear(width, vocab_size))

    def forward(self, tokens: Int[Tensor, "b t"]) -> Float[Tensor, "b t v"]:
        code = self.blocks(self.embedding(tokens))[:, -1:]
        return self.head(self.decode(code + sinusoids(tokens.shape[1], code)))


def sinusoids(length: int, like: Float[Tensor, "*_ d"]) -> Float[Tensor, "t d"]:
    """Fixed position vectors, sines in the first half and cosines in the second, at wavelengths from 2 pi to 2e4 pi."""
    half = like.shape[-1] // 2
    rates = 1e4 ** -(torch.arange(half, device=like.device) / half)
    angles = torch.arange(length, device=like.device)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], -1).to(like.dtype)


def build_backbone(task: str, vocab_size: int, mixer: str, training: Training, initialisation: str) -> nn.Module:
    """The task's backbone around a mixer, with as many parameters as softmax attention's, whatever the mixer adds.

    Every linear map of the model, the mixer's own included, starts by one rule: "normal", N(0, 0.02), or "torch",
    uniform within 1 / sqrt(inputs). Biases start at 0, embeddings N(0, 0.02), the conditioner's columns at 0; what a
    published mixer has besides linear maps starts as it was published.
    """
    extra = _parameters(mixer, training) - _parameters("softmax", training)
    inner = training.mlp_width - round(extra / (3 * training.width))
    layers = [
        Residual(training.width, layer)
        for _ in range(training.blocks)
        for layer in (_mixer(mixer, training), SwiGLU(training.width, inner))
    ]
    backbone = AutoEncoderBackbone if task == "compression" else LanguageBackbone
    model = backbone(vocab_size, training.width, nn.Sequential(*layers))
    initialise(model, initialisation)
    return model


def _mixer(name: str, training: Training) -> nn.Module:
    width, heads = training.width, training.heads
    if name in PUBLISHED:
        return build(PUBLISHED[name], width, max(1, min(heads, width // NARROWEST)))
    return FreeEnergyMixer(mixer_config(name, width, heads))


def _parameters(mixer: str, training: Training) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in _mixer(mixer, training).parameters())
