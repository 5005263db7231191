"""The paper's forecaster around a mixer: its tokens are segments of the history, channel by channel."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from fem.config import FreeEnergyMixerConfig
from fem.mixer import FreeEnergyMixer
from fem_research.common.blocks import EPS, Residual, count_parameters, initialise, narrowed
from fem_research.common.mixers import fields_of
from fem_research.forecast.settings import NONE

STD = 0.02


class SegmentTokens(nn.Module):
    """Two tokens for every segment x_n of every channel c: one from a mixture of all channels, one from c alone.

        z_c,2n = RMSNorm(W_context (M x_n)_c)          z_c,2n+1 = RMSNorm(W_main x_nc)

    segments (B, C, N, S) -> tokens (B, C, 2 N, D), to which learnt vectors of position and channel are added before a
    norm. M is (C, C).
    """

    def __init__(self, channels: int, segments: int, length: int, width: int, dropout: float):
        super().__init__()
        self.channels = nn.Linear(channels, channels)
        self.context = nn.Sequential(nn.Linear(length, width), nn.RMSNorm(width, EPS))
        self.main = nn.Sequential(nn.Linear(length, width), nn.RMSNorm(width, EPS))
        self.position = nn.Parameter(STD * torch.randn(2 * segments, width))
        self.channel = nn.Parameter(STD * torch.randn(channels, 2 * segments, width))
        self.dropout = nn.Dropout(dropout)
        self.norm = nn.RMSNorm(width, EPS)

    def forward(self, segments: Float[Tensor, "b c n s"]) -> Float[Tensor, "b c m d"]:
        mixed = self.channels(segments.transpose(1, 3)).transpose(1, 3)
        pairs = torch.stack([self.context(mixed), self.main(segments)], 3).flatten(2, 3)
        return self.norm(self.dropout(pairs) + self.position + self.channel)


class ForecastBackbone(nn.Module):
    """The next `horizon` rows of all channels, from the tokens of the past.

        x = (history - level) / spread       level: mean of the last segment, spread: standard deviation of the history
        x_{n+1} ~ W z_n + b                  z_n: the output of the blocks at the channel's own token of segment n
        forecast = spread x_{N+1} + level

    Segments are as long as the horizon; the first one is padded with zeros on the left. The blocks see each channel
    alone.
    Raises ValueError unless the lookback is longer than the horizon.
    """

    def __init__(self, channels: int, lookback: int, horizon: int, width: int, blocks: nn.Sequential, dropout: float):
        super().__init__()
        if lookback <= horizon:
            raise ValueError(f"lookback must be longer than the horizon {horizon}, got {lookback}.")
        self.horizon = horizon
        segments = -(-lookback // horizon)
        self.padding = segments * horizon - lookback
        self.tokens = SegmentTokens(channels, segments, horizon, width, dropout)
        self.blocks = blocks
        self.head = nn.Sequential(nn.RMSNorm(width, EPS), nn.Linear(width, horizon))

    def forward(self, history: Float[Tensor, "b l c"]) -> Float[Tensor, "b h c"]:
        return self._read(history)[0]

    def loss(self, history: Float[Tensor, "b l c"], future: Float[Tensor, "b h c"]) -> Float[Tensor, ""]:
        """Squared error of the forecast, plus that of every segment's successor in the history, on its own scale."""
        forecast, successors, segments = self._read(history)
        return F.mse_loss(forecast, future) + F.mse_loss(successors[:, :, :-1], segments[:, :, 1:])

    def _read(self, history: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        level = history[:, -self.horizon :].mean(1, keepdim=True)
        spread = history.std(1, keepdim=True) + 1e-8
        x = F.pad(((history - level) / spread).transpose(1, 2), (self.padding, 0))
        segments = x.unflatten(2, (-1, self.horizon))
        z = self.tokens(segments)
        z = self.blocks(z.flatten(0, 1)).view_as(z)
        successors = self.head(z[:, :, 1::2])
        return spread * successors[:, :, -1].transpose(1, 2) + level, successors, segments


def build_backbone(
    mixer: str,
    channels: int,
    lookback: int,
    horizon: int,
    *,
    width: int,
    layers: int,
    heads: int,
    dropout: float,
    beta_max_init: float = 1.8,
) -> ForecastBackbone:
    """The forecaster around a mixer, with the parameters of the one around softmax attention: its MLPs are narrower.

    beta_max_init: of a mixer that learns beta. Linear weights start N(0, 0.02), those that write into the
    residual stream N(0, 0.02 / sqrt(2 layers)), biases at 0 and the conditioner's columns at 0.
    """

    def config(name: str) -> FreeEnergyMixerConfig:
        own = fields_of(name)
        start = {"beta_max_init": beta_max_init} if own["use_temperature"] else {}
        return FreeEnergyMixerConfig.matched(n_embd=width, n_head=heads, **start | own)

    with torch.device("meta"):
        own = 0 if mixer == NONE else count_parameters(FreeEnergyMixer(config(mixer)))
        extra = own - count_parameters(FreeEnergyMixer(config("softmax")))
    inner = narrowed(4 * width, extra, 2 * width + 1, mixer)
    parts: list[nn.Module] = []
    for _ in range(layers):
        if mixer != NONE:
            parts.append(FreeEnergyMixer(config(mixer)))
        parts.append(nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width)))
    blocks = nn.Sequential(*(Residual(width, part, dropout) for part in parts))
    backbone = ForecastBackbone(channels, lookback, horizon, width, blocks, dropout)
    initialise(backbone, "normal")
    for part in parts:
        written = part.output if isinstance(part, FreeEnergyMixer) else part[-1]
        nn.init.normal_(written.weight, std=STD / math.sqrt(2 * layers))
    return backbone
