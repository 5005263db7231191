"""The models around a mixer: blocks of [mixer, SwiGLU], between an embedding and what the task predicts."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from fem_research.common.blocks import EPS, initialise, mixer_blocks
from fem_research.mad.settings import Training


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
    """Tokens (B, T) -> logits (B, T, V), all of them from h, the blocks' output at the last token:

    logits_t = head(decode(h + position_t))
    """

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
    """The task's model around a mixer: as many parameters as around softmax attention (`mixer_blocks`), and all linear
    maps started by one rule (`initialise`)."""
    blocks = mixer_blocks(mixer, training.width, training.heads, training.blocks, training.mlp_width)
    backbone = AutoEncoderBackbone if task == "compression" else LanguageBackbone
    model = backbone(vocab_size, training.width, blocks)
    initialise(model, initialisation)
    return model
