"""One run of the paper's backbone: trained on all windows, validated after every epoch, tested once.

A plain loop: around a Trainer, two losses, validation on all windows and exact resumption would take more code.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from rich.progress import Progress
from torch import Tensor, nn

from fem.optim import parameter_groups
from fem_research.common import loops
from fem_research.common.blocks import count_parameters
from fem_research.forecast.backbone import build_backbone
from fem_research.forecast.series import Windows
from fem_research.forecast.settings import Job

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
    """Train the job's backbone, from the last checkpoint in `folder` if there is one; returns its record.

    The weights with the lowest validation error are tested. Raises ValueError where no epoch has a finite one.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    recipe = job.recipe
    split = job.windows(device)
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
        ).to(device)
    batches = -(-len(split["train"]) // job.batch)
    groups = parameter_groups(backbone, recipe.weight_decay)
    optimiser = torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=BETAS)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: one_cycle(step / (recipe.epochs * batches)))
    training = Training(backbone, optimiser, schedule)
    training.resume(folder)
    bar = bars.add_task(job.title, total=recipe.epochs * batches, completed=training.epoch * batches)
    while training.epoch < recipe.epochs and training.epoch - training.best_epoch < recipe.patience:
        started, total = time.process_time(), 0.0
        with torch.random.fork_rng():
            torch.manual_seed((job.seed << 16) + training.epoch)
            backbone.train()
            for history, future in shuffled(split["train"], job.batch):
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
    """What is kept of a run: its names, size, errors on test, CPU seconds of training, curve and one forecast."""
    return {
        "data": job.series.name,
        "horizon": job.horizon,
        "model": job.model,
        "seed": job.seed,
        "lookback": job.lookback,
        "parameters": count_parameters(model),
        **score(forecast, test)._asdict(),
        "seconds": seconds,
        "curve": curve,
        "example": example(forecast, test),
    }


class Training:
    """The state of a run between two epochs, saved in one checkpoint."""

    def __init__(
        self, backbone: nn.Module, optimiser: torch.optim.Optimizer, schedule: torch.optim.lr_scheduler.LRScheduler
    ):
        self.parts = {"backbone": backbone, "optimiser": optimiser, "schedule": schedule}
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
