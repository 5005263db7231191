"""The paper's forecaster around a mixer, and one run of it: trained on all windows, validated after every epoch.

Backbone, sizes and training are those of Table 4's protocol: Lu and Yang, Linear Transformers as VAR Models, ICML 2025
(arXiv 2502.07244), and its code.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from rich.progress import Progress
from torch import Tensor, nn

from fem.config import FreeEnergyMixerConfig
from fem.mixer import FreeEnergyMixer
from fem.optim import parameter_groups
from fem_research.common import loops
from fem_research.common.blocks import EPS, Residual, count_parameters, initialise, narrowed
from fem_research.common.mixers import fields_of, mixer_config
from fem_research.forecast.series import Windows
from fem_research.forecast.settings import NONE, Job

STD = 0.02


class SegmentTokens(nn.Module):
    """Two tokens for every segment x_n of every channel c: one from a mixture of all channels, one from c only.

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
    mlp: str = "narrowed",
) -> ForecastBackbone:
    """The forecaster around a mixer, with the parameters of the one around softmax attention: its MLPs are narrower,
    unless mlp is "kept".

    Weights start N(0, 0.02), those that write into the residual stream N(0, 0.02 / sqrt(2 layers)), biases and the
    conditioner's columns at 0.
    """

    def config(name: str) -> FreeEnergyMixerConfig:
        start = {"beta_max_init": beta_max_init} if fields_of(name)["use_temperature"] else {}
        return mixer_config(name, width, heads, **start)

    with torch.device("meta"):
        own = 0 if mixer == NONE else count_parameters(FreeEnergyMixer(config(mixer)))
        extra = own - count_parameters(FreeEnergyMixer(config("softmax")))
    inner = 4 * width if mlp == "kept" else narrowed(4 * width, extra, 2 * width + 1, mixer)
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


BETAS = (0.9, 0.95)
RISE, START = 0.05, 0.1  # the learning rate starts at a tenth of its peak, and rises for 5 % of the steps
CLIP = 1.0
SCORED_AT_ONCE = 64

Forecast = Callable[[Tensor], Tensor]


class Score(NamedTuple):
    """Mean squared and mean absolute error over all windows, steps and channels, on scaled data."""

    mse: float
    mae: float


def train(job: Job, folder: Path, bars: Progress) -> dict:
    """Train the job's backbone, from the last checkpoint in `folder` if any; its best weights are tested."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    recipe = job.recipe
    split = job.windows(job.lookback, device)
    with torch.random.fork_rng():
        torch.manual_seed(job.seed)
        backbone = build_backbone(
            job.model,
            len(job.series.channels),
            job.lookback,
            job.horizon,
            width=job.width,
            layers=recipe.layers,
            heads=recipe.heads,
            dropout=recipe.dropout,
            beta_max_init=recipe.beta_max_init,
            mlp=recipe.mlp,
        ).to(device)
    batches = -(-len(split["train"]) // job.batch)
    groups = parameter_groups(backbone, recipe.weight_decay)
    optimiser = torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=BETAS)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: one_cycle(step / (recipe.epochs * batches)))
    training = Training(backbone=backbone, optimiser=optimiser, schedule=schedule)
    training.resume(folder)
    bar = bars.add_task(job.title, total=recipe.epochs * batches, completed=training.epoch * batches)
    while training.epoch < recipe.epochs and training.epoch - training.best_epoch < recipe.patience:
        started, total = time.process_time(), 0.0
        with torch.random.fork_rng():
            torch.manual_seed((job.seed << 16) + training.epoch)
            backbone.train()
            for history, future in shuffled(split["train"], job.batch):
                with torch.autocast(device.type, torch.bfloat16, enabled=recipe.dtype == "bfloat16"):
                    loss = backbone.loss(history, future)
                loops.descend(loss, optimiser, schedule, CLIP)
                total += loss.item()
                bars.advance(bar)
        backbone.eval()
        validation = score(backbone, split["validation"])
        training.close_epoch(total / batches, validation, time.process_time() - started)
        training.save(folder)
        bars.update(bar, description=f"{job.title}, validation MSE {validation.mse:.4f}")
    bars.update(bar, completed=recipe.epochs * batches)
    if training.best_epoch == 0:
        raise ValueError(f"{job.title}: no epoch has a finite validation error; lower the learning rate.")
    backbone.load_state_dict(training.best)
    backbone.eval()
    return record(job, backbone, backbone, split["test"], training.seconds, training.curve)


def record(job: Job, model: nn.Module, forecast: Forecast, test: Windows, seconds: float, curve: list[dict]) -> dict:
    """The record of a run: its names, size, errors on test, CPU seconds of training, curve and one forecast."""
    names = {"data": job.series.name, "horizon": job.horizon, "model": job.model, "seed": job.seed}
    sizes = {"lookback": test.lookback, "parameters": count_parameters(model)}
    scores = score(forecast, test)._asdict()
    return names | sizes | scores | {"seconds": seconds, "curve": curve, "example": example(forecast, test)}


class Training:
    """The state of a run between two epochs, saved in one checkpoint."""

    def __init__(self, **parts: Any):
        self.parts = parts
        self.best = {}
        self.curve: list[dict] = []
        self.seconds = 0.0

    @property
    def epoch(self) -> int:
        return len(self.curve)

    @property
    def best_epoch(self) -> int:
        finite = [point for point in self.curve if point["validation_mse"] < float("inf")]
        return min(finite, key=lambda point: point["validation_mse"])["epoch"] if finite else 0

    def close_epoch(self, loss: float, validation: Score, seconds: float) -> None:
        self.seconds += seconds
        self.curve.append({"epoch": self.epoch + 1, "train_loss": loss, "validation_mse": validation.mse})
        if self.best_epoch == self.epoch:
            self.best = {name: tensor.detach().clone() for name, tensor in self.parts["backbone"].state_dict().items()}

    def save(self, folder: Path) -> None:
        loops.save(folder, self.epoch, self.parts, {"best": self.best, "curve": self.curve, "seconds": self.seconds})

    def resume(self, folder: Path) -> None:
        """Load the newest complete checkpoint, if there is one. Raises ValueError where all are damaged."""
        device = next(self.parts["backbone"].parameters()).device
        if (measured := loops.restore(folder, self.parts, device)) is not None:
            self.best, self.curve, self.seconds = measured["best"], measured["curve"], measured["seconds"]


def one_cycle(share: float) -> float:
    """The learning rate after this share of all steps, over its peak: linear from 0.1 to 1, then linear to 0."""
    return START + (1 - START) * share / RISE if share < RISE else max(0.0, (1 - share) / (1 - RISE))


def shuffled(data: Windows, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of all windows in random order; the last one may be smaller."""
    for index in torch.randperm(len(data)).split(batch):
        yield data.take(index.to(data.rows.device))


@torch.no_grad()
def score(forecast: Forecast, data: Windows) -> Score:
    """Errors of a forecast, (B, L, C) -> (B, H, C), over all windows: none is dropped."""
    squared = absolute = cells = 0.0
    for index in torch.arange(len(data), device=data.rows.device).split(SCORED_AT_ONCE):
        history, future = data.take(index)
        error = (forecast(history) - future).double()
        squared += error.square().sum().item()
        absolute += error.abs().sum().item()
        cells += error.numel()
    return Score(squared / cells, absolute / cells)


@torch.no_grad()
def example(forecast: Forecast, data: Windows) -> dict[str, list[float]]:
    """The last channel in the middle window: the end of its history, its future and the forecast."""
    history, future = data.take(torch.tensor([len(data) // 2], device=data.rows.device))
    shown = {"history": history[:, -2 * data.horizon :], "future": future, "forecast": forecast(history)}
    return {name: [round(value, 4) for value in rows[0, :, -1].tolist()] for name, rows in shown.items()}
