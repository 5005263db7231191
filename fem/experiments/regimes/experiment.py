"""`fem regimes`: where the free energy pays, and where it does not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from fem.experiments.common.blocks import INITIALISATIONS
from fem.experiments.common.mixers import canonical
from fem.experiments.common.options import recipe_options
from fem.experiments.common.run import command_line, open_run, option, progress
from fem.experiments.common.sweep import finished, sweep
from fem.experiments.common.tables import show_table, write_table
from fem.experiments.regimes.training import TASKS, Job, Training, sizes, train

ROWS = (
    "softmax,softmax+G,softmax+L,softmax+LT,softmax+LTG,softmax+LTG/r4,softmax+C,softmax+CG,softmax+CLTG,"
    "softmax+CLTG/r4,gla,gla/norm,gla+LTG,gla+LTG/r4"
)
ETT = ("ett-extremes", "ett-events")


@dataclass(frozen=True, kw_only=True)
class RegimesRecipe:
    """Tasks, rows and the training that all share. Lists are written with commas."""

    tasks: str = option("peak,high-water,snapshot,statistics,recall,bags", f"From {', '.join([*TASKS, *ETT])}.")
    mixers: str = option(ROWS, "Priors with parts and options, such as softmax+LTG/r4 (gates of rank 4), /wide, /b8.")
    learning_rates: str = option("0.003,0.006,0.012", "Every row takes the best on the first seed's validation.")
    seeds: int = option(3, "How many seeds; each draws its own weights and data.")
    seed: int = option(0, "First seed.")
    ett: Path | None = option(None, "ETTm1.csv or .csv.gz, for the tasks of ETT.")  # noqa: RUF009
    width: int = option(64, "Width of a model.")
    heads: int = option(4, "Heads of every mixer.")
    blocks: int = option(1, "Blocks of [mixer, SwiGLU].")
    mlp_width: int = option(176, "Width of softmax attention's SwiGLU; others pay with it for what they add.")
    initialisation: str = option("torch", f"How linear maps start, for all alike: {' or '.join(INITIALISATIONS)}.")
    batch: int = option(16, "Examples a step.")
    steps: int = option(500, "Optimiser steps.")

    def __post_init__(self):
        for name in ("seeds", "width", "heads", "blocks", "mlp_width", "batch", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}.")
        known = [*TASKS, *ETT]
        if unknown := [task for task in self.task_names if task not in known]:
            raise ValueError(f"tasks must be from {', '.join(known)}; got {', '.join(unknown)}.")
        if self.ett is None and (of_ett := [task for task in self.task_names if task in ETT]):
            raise ValueError(f"{', '.join(of_ett)} needs the data: give --ett ETTm1.csv.gz.")
        if self.initialisation not in INITIALISATIONS:
            raise ValueError(f"initialisation must be from {', '.join(INITIALISATIONS)}, got {self.initialisation!r}.")
        if not (self.task_names and self.rows and self.rates):
            raise ValueError("tasks, mixers and learning_rates must name at least one each.")

    @property
    def task_names(self) -> list[str]:
        return _listed(self.tasks)

    @property
    def rows(self) -> list[str]:
        return list(dict.fromkeys(canonical(name) for name in _listed(self.mixers)))

    @property
    def rates(self) -> list[float]:
        try:
            return [float(rate) for rate in _listed(self.learning_rates)]
        except ValueError:
            raise ValueError(f"learning_rates must be numbers with commas, got {self.learning_rates!r}.") from None

    @property
    def training(self) -> Training:
        shared = {field.name for field in fields(Training)} & {field.name for field in fields(self)}
        return Training(**{name: getattr(self, name) for name in shared})

    def tuning(self, task: str) -> list[Job]:
        """Every row at every learning rate, on the first seed."""
        return [self._job(task, row, rate, self.seed) for row in self.rows for rate in self.rates]

    def chosen(self, task: str, tuned: dict[str, dict]) -> dict[str, list[Job]]:
        """Every row at the learning rate of the best last validation, on every seed."""
        found = {}
        for row in self.rows:
            score = lambda rate: tuned[self._job(task, row, rate, self.seed).key]["curve"][-1]["validation"]  # noqa: B023, E731
            best = max(self.rates, key=score)
            found[row] = [self._job(task, row, best, self.seed + index) for index in range(self.seeds)]
        return found

    def _job(self, task: str, mixer: str, rate: float, seed: int) -> Job:
        return Job(task=task, sizes=sizes(task), mixer=mixer, learning_rate=rate, seed=seed, training=self.training)


def _listed(text: str) -> list[str]:
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def measure(recipe: RegimesRecipe, folder: Path, workers: int | None) -> Iterator[tuple[str, dict[str, list[dict]]]]:
    """Task by task, the records of every row in the order of the seeds; what `folder` holds is not run again."""
    run = partial(train, ett=recipe.ett)
    with progress() as bars:
        bar = bars.add_task("regimes", total=None)
        for task in recipe.task_names:
            for jobs in (recipe.tuning(task), None):
                if jobs is None:
                    chosen = recipe.chosen(task, finished(recipe.tuning(task), folder))
                    jobs = [job for of_row in chosen.values() for job in of_row]
                done = finished(jobs, folder)
                missing = [job for job in jobs if job.key not in done]
                bars.reset(bar, total=len(jobs), completed=len(done), description=f"regimes: {task}")
                for _ in sweep(missing, folder, run, workers):
                    bars.update(bar, advance=1)
            records = finished([job for of_row in chosen.values() for job in of_row], folder)
            yield task, {row: [records[job.key] for job in of_row] for row, of_row in chosen.items()}


def run(recipe: RegimesRecipe, output: Path, workers: int | None = None) -> dict:
    """Run what `output`/runs does not have yet, then write table, page and plots; returns what results.json holds."""
    from fem.experiments.regimes.report import overview, picture, summary, write_report

    found = dict(measure(recipe, output / "runs", workers))
    with open_run(output, "regimes", recipe) as under_way:
        folder = under_way.folder
        for task, rows in found.items():
            for row, records in rows.items():
                for record in records:
                    job = {"task": task, "mixer": row, "seed": record["job"]["seed"]}
                    for point in record["curve"]:
                        under_way.log(experiment="regimes", **job, **point)
        write_table(folder, "table", overview(found))
        picture(folder / "scores.png", found, recipe)
        write_report(folder, found, recipe, command_line("regimes", recipe, RegimesRecipe()))
        tuned = {task: finished(recipe.tuning(task), output / "runs") for task in found}
        results = under_way.finish({"regimes": summary(found, tuned)})
    show_table("Scores by task, mean over seeds", overview(found))
    return results


@recipe_options(RegimesRecipe())
def command(
    changes: dict,
    output: Annotated[Path, typer.Option(help="Folder of the run.")] = Path("runs/regimes"),
    workers: Annotated[int | None, typer.Option(help="Runs at a time; default: one per core, or four per GPU.")] = None,
):
    """Where the free energy pays: extremes, latest values, averages, recall, bags. A stopped run goes on."""
    run(replace(RegimesRecipe(), **changes), output, workers)
    typer.echo(f"written to {output}: report.md, results.json, table.csv, scores.png")
