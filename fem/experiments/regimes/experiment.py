"""`fem regimes`: where the free energy helps, and where it does not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

from fem.experiments.common.run import check_output, command_line, open_run, progress
from fem.experiments.common.sweep import finished, sweep
from fem.experiments.common.tables import show_table, write_table
from fem.experiments.regimes.report import overview, redraw, summary, write_report
from fem.experiments.regimes.settings import RegimesRecipe
from fem.experiments.regimes.training import Job, constants, train


def measure(recipe: RegimesRecipe, folder: Path, workers: int | None) -> Iterator[tuple[str, dict[str, list[dict]]]]:
    """Task by task, the records of every mixer in the order of the seeds. Jobs with a record in `folder` do not run."""
    run = partial(train, tasks=recipe.known_tasks)
    with progress() as bars:
        bar = bars.add_task("regimes", total=None)

        def records(task: str, jobs: list[Job]) -> dict[str, dict]:
            done = finished(jobs, folder)
            bars.reset(bar, total=len(jobs), completed=len(done), description=f"regimes: {task}")
            for _ in sweep([job for job in jobs if job.key not in done], folder, run, workers):
                bars.advance(bar)
            return finished(jobs, folder)

        for task in recipe.task_names:
            chosen = recipe.chosen(task, records(task, recipe.tuning(task)))
            found = records(task, [job for of_row in chosen.values() for job in of_row])
            yield task, {row: [found[job.key] for job in of_row] for row, of_row in chosen.items()}


def run(recipe: RegimesRecipe, output: Path, workers: int | None = None) -> dict:
    """Run the jobs without a record in `output`/runs, write table, page and plots; returns what results.json holds."""
    check_output(output, "regimes")
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
        floors = constants(recipe.training, {task: recipe.known_tasks[task] for task in found})
        write_report(folder, found, floors, recipe, command_line("regimes", recipe, RegimesRecipe()))
        tuned = {task: finished(recipe.tuning(task), output / "runs") for task in found}
        results = under_way.finish({"regimes": summary(found, tuned), "constants": floors})
        redraw(results, asdict(recipe), folder)
    show_table("Scores by task, mean over seeds", overview(found))
    return results
