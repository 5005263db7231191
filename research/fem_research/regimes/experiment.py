"""`fem regimes`: where the free energy helps, and where it does not."""

from __future__ import annotations

from functools import partial
from itertools import product
from pathlib import Path

import torch

from fem.runs.run import RUNS, check_output, command_line, progress
from fem_research.common.grid import Grid, publish
from fem_research.common.sweep import sweep
from fem_research.regimes.report import overview, redraw, summary, write_report
from fem_research.regimes.settings import RegimesRecipe
from fem_research.regimes.training import build, constants, train


def run(recipe: RegimesRecipe, output: Path, workers: int | None = None) -> dict:
    """Run the jobs without a record in `output`/runs, write table, page and plots; returns what results.json holds."""
    check_output(output, "regimes")
    floors = constants(recipe.training, {task: recipe.known_tasks[task] for task in recipe.task_names})
    with torch.device("meta"):  # what cannot be built is refused before anything is written
        for task, row in product(recipe.task_names, recipe.rows):
            build(recipe.known_tasks[task], row, recipe.training)
    train_all = partial(sweep, train=partial(train, tasks=recipe.known_tasks), workers=workers)
    seeds = range(recipe.seed, recipe.seed + recipe.seeds)
    tasks = {}
    with progress() as bars:
        for task in recipe.task_names:
            grid = Grid(output / RUNS, train_all, bars, f"regimes: {task}")
            tasks[task] = grid.tuned(recipe.rows, recipe.rates, seeds, partial(recipe.job, task), error)
    found = {task: of_task.chosen for task, of_task in tasks.items()}
    return publish(
        output,
        "regimes",
        recipe,
        records=(
            ({"task": task, "mixer": row, "seed": record["job"]["seed"]}, record)
            for task, rows in found.items()
            for row, records in rows.items()
            for record in records
        ),
        tables={"table": overview(found)},
        page=lambda folder: write_report(
            folder, found, floors, recipe, command_line("regimes", recipe, RegimesRecipe())
        ),
        results={"regimes": summary(tasks), "constants": floors},
        redraw=redraw,
        shown=("Scores by task, mean over seeds", overview(found)),
    )


def error(record: dict) -> float:
    """What decides between learning rates: the last score on the validation, upside down."""
    return -record["curve"][-1]["validation"]
