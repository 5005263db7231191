"""The model around a mixer: two blocks of [mixer, SwiGLU], and what a task needs before and behind them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from fem.config import FreeEnergyMixerConfig
from fem.experiments.common.baselines import Published, build
from fem.experiments.common.mixers import PUBLISHED, fields_of
from fem.experiments.mad.settings import Training
from fem.mixer import FreeEnergyMixer

EPS = 1e-5
INITIALISATIONS = ("normal", "torch")
NARROWEST = 32  # channels of a head that the kernels of published mixers take


class SwiGLU(nn.Module):
    """y = W_down (silu(W_gate x) * W_up x)"""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.gate_and_up = nn.Linear(width, 2 * inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        gate, up = self.gate_and_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Residual(nn.Module):
    """x + layer(RMSNorm(x))"""

    def __init__(self, width: int, layer: nn.Module):
        super().__init__()
        self.norm = nn.RMSNorm(width, EPS)
        self.layer = layer

    def forward(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        return x + self.layer(self.norm(x))


class LanguageHost(nn.Module):
    """Tokens (B, T) -> logits (B, T, V): embedding, blocks, norm, head."""

    def __init__(self, vocab_size: int, width: int, blocks: nn.Sequential):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.blocks = blocks
        self.head = nn.Sequential(nn.RMSNorm(width, EPS), nn.Linear(width, vocab_size))

    def forward(self, tokens: Int[Tensor, "b t"]) -> Float[Tensor, "b t v"]:
        return self.head(self.blocks(self.embedding(tokens)))


class AutoEncoderHost(nn.Module):
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


def build_host(task: str, vocab_size: int, mixer: str, training: Training, initialisation: str) -> nn.Module:
    """The task's host around a mixer, with the parameters of the host of softmax attention, whatever the mixer adds.

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
    host = AutoEncoderHost if task == "compression" else LanguageHost
    model = host(vocab_size, training.width, nn.Sequential(*layers))
    initialise(model, initialisation)
    return model


def _mixer(name: str, training: Training) -> nn.Module:
    width, heads = training.width, training.heads
    if name in PUBLISHED:
        return build(PUBLISHED[name], width, max(1, min(heads, width // NARROWEST)))
    return FreeEnergyMixer(FreeEnergyMixerConfig.matched(n_embd=width, n_head=heads, **fields_of(name)))


def _parameters(mixer: str, training: Training) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in _mixer(mixer, training).parameters())


@torch.no_grad()
def initialise(model: nn.Module, initialisation: str) -> None:
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
