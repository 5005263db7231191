"""One run: a model around a mixer, trained on a task and tested at evenly spaced steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Generator, Tensor, nn

from fem.gates import Temperature
from fem.train.data import digest
from fem_research.common.blocks import EPS, BagModel, count_parameters, initialise, mixer_blocks
from fem_research.common.grid import digest_of
from fem_research.common.loops import descend
from fem_research.common.mixers import POOLS
from fem_research.regimes.flights import LateFlights
from fem_research.regimes.tasks import (
    DailyExtremes,
    DigitBags,
    Exceeded,
    HighWater,
    PeakHold,
    Recall,
    SetStatistics,
    Snapshot,
    Speakers,
    Task,
)

TASKS: dict[str, Task] = {
    "peak": PeakHold(),
    "high-water": HighWater(),
    "snapshot": Snapshot(),
    "statistics": SetStatistics(),
    "recall": Recall(),
    "bags": DigitBags(),
    "peak-64": PeakHold(sensors=64),
    "peak-128": PeakHold(sensors=128),
    "snapshot-64": Snapshot(fields=64, tokens=128),
}
FROM_FILE: dict[str, Callable[[str], Task]] = {
    "ett-extremes": DailyExtremes,
    "ett-events": Exceeded,
    "speakers": Speakers,
    "flights": LateFlights,
}
STREAMS = {"train": 0, "validation": 1, "test": 2}


@dataclass(frozen=True, kw_only=True)
class Training:
    """The settings that all models of a table share."""

    width: int = 64
    heads: int = 4
    blocks: int = 1
    mlp_width: int = 176
    initialisation: str = "torch"
    batch: int = 16
    steps: int = 500
    warmup: float = 0.05
    tests: int = 6
    validation_examples: int = 256
    test_examples: int = 512


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything that decides the result of a run."""

    task: str
    sizes: dict[str, int | float | str]  # of the task, or a digest of its file
    mixer: str
    learning_rate: float
    seed: int
    training: Training

    @property
    def key(self) -> str:
        """A file name that differs between jobs which differ in any value."""
        return f"{self.task}-{self.mixer.replace('/', '_')}-seed{self.seed}-{digest_of(asdict(self))}"


class Model(nn.Module):
    """Inputs (B, T, C) -> answers (B, T, outputs): linear map, blocks of [mixer, SwiGLU], norm, linear map."""

    def __init__(self, task: Task, mixer: str, training: Training):
        super().__init__()
        width = training.width
        self.read = nn.Linear(task.channels, width)
        self.blocks = mixer_blocks(mixer, width, training.heads, training.blocks, training.mlp_width)
        self.answer = nn.Sequential(nn.RMSNorm(width, EPS), nn.Linear(width, task.outputs))
        initialise(self, training.initialisation)

    def forward(self, x: Float[Tensor, "b t c"]) -> Float[Tensor, "b t o"]:
        return self.answer(self.blocks(self.read(x)))


class PoolModel(BagModel):
    """Bags (B, T, C) whose last token is empty -> answers (B, T, outputs), 0 before the last token."""

    def forward(self, x: Float[Tensor, "b t c"]) -> Float[Tensor, "b t o"]:
        keep = x.new_ones(x.shape[0], x.shape[1] - 1, dtype=bool)
        return F.pad(super().forward(x[:, :-1], keep), (0, 0, x.shape[1] - 1, 0))


def build(task: Task, mixer: str, training: Training) -> nn.Module:
    if mixer not in POOLS:
        return Model(task, mixer, training)
    width, heads, mlp = training.width, training.heads, training.mlp_width
    return PoolModel(task.channels, task.outputs, mixer, width, heads, mlp, training.initialisation)


def train(
    job: Job, device: torch.device, checkpoints: Path | None = None, *, tasks: Mapping[str, Task] = TASKS
) -> dict[str, Any]:
    """Run the job; returns "curve" (step, train_loss, validation, test, beta), "parameters" and "seconds".

    AdamW without weight decay, linear warm-up, cosine to 0, gradients clipped at norm 1; every batch is new. `place`
    stays empty: a stopped training, which takes minutes, begins again.
    """
    began = perf_counter()
    task, training = tasks[job.task], job.training
    with torch.random.fork_rng():
        torch.manual_seed(job.seed)
        model = build(task, job.mixer, training).to(device)
    optimiser = torch.optim.AdamW(model.parameters(), lr=job.learning_rate, weight_decay=0.0)
    rise = max(1, round(training.warmup * training.steps))
    fall = max(1, training.steps - rise)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser,
        lambda step: min((step + 1) / rise, (1 + math.cos(math.pi * max(0, step - rise) / fall)) / 2),
    )
    streams = {name: Generator().manual_seed(1000 * job.seed + number) for name, number in STREAMS.items()}
    held_out = {
        "validation": task.draw(streams["validation"], training.validation_examples, "validation"),
        "test": task.draw(streams["test"], training.test_examples, "test"),
    }
    tested = {round(training.steps * part / training.tests) for part in range(1, training.tests + 1)}
    curve: list[dict] = []
    for step in range(1, training.steps + 1):
        x, targets = (tensor.to(device) for tensor in task.draw(streams["train"], training.batch))
        loss = task.loss(model(x), targets)
        descend(loss, optimiser, schedule, clip=1.0)
        if step in tested:
            found = {split: evaluate(model, task, examples, device) for split, examples in held_out.items()}
            curve.append({"step": step, "train_loss": loss.item(), **found, **temperatures(model)})
    return {"curve": curve, "parameters": count_parameters(model), "seconds": perf_counter() - began}


@torch.no_grad()
def evaluate(model: nn.Module, task: Task, examples: tuple[Tensor, Tensor], device: torch.device) -> float:
    x, targets = examples
    answers = torch.cat([model(part.to(device)).cpu() for part in x.split(128)])
    return task.score(answers, targets) if answers.isfinite().all() else math.nan  # whose argmax is a class


@torch.no_grad()
def temperatures(model: nn.Module) -> dict[str, float]:
    """Mean, smallest and largest of the first layer's beta; {} where there is none."""
    temperature = next((part for part in model.modules() if isinstance(part, Temperature)), None)
    if temperature is None:
        return {}
    beta = temperature()
    return {"beta": beta.mean().item(), "beta_min": beta.min().item(), "beta_max": beta.max().item()}


def sizes(task: str, file: Path | None = None) -> dict[str, int | float | str]:
    """The task's own sizes, or a digest of the file that its data are from."""
    if file is not None:
        return {"file": digest(file)}
    return asdict(TASKS[task]) if is_dataclass(TASKS[task]) else {}


def constants(training: Training, tasks: Mapping[str, Task]) -> dict[str, float]:
    """Each task's score of the best answer that does not depend on the inputs, on the test of seed 0."""
    scores = {}
    for name, task in tasks.items():
        _, targets = task.draw(Generator().manual_seed(STREAMS["test"]), training.test_examples, "test")
        scores[name] = task.constant(targets)
    return scores
