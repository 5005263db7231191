"""`fem forecast`: forecasters of equal size that differ in their mixer alone, and the baselines of neuralforecast."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from fem.runs.run import RUNS, check_output, command_line, cpu_threads, progress
from fem_research.common.grid import Grid, one_by_one, publish
from fem_research.forecast.settings import ForecastRecipe, Job


def run(recipe: ForecastRecipe, output: Path) -> dict:
    """Run the jobs without a record in `output`/runs, write tables, plots, report; returns what results.json holds.

    Raises ValueError on data that cannot be trained on, before any training.
    """
    check_output(output, "forecast")
    from fem_research.forecast import report
    from fem_research.forecast.training import train

    jobs = recipe.jobs()
    if any(job.is_baseline for job in jobs):
        from fem_research.forecast.baselines import train_baseline
    with cpu_threads(recipe.threads), progress() as bars:

        def train_one(job: Job, place: Path) -> dict:
            return train_baseline(job, bars) if job.is_baseline else train(job, place, bars)

        records = Grid(output / RUNS, partial(one_by_one, train=train_one), bars, "models").records(jobs)
    for job in jobs:
        (output / RUNS / f"{job.key}.pt").unlink(missing_ok=True)  # of earlier versions
    names = ("data", "horizon", "model", "seed")
    return publish(
        output,
        "forecast",
        recipe,
        records=(({name: record[name] for name in names}, record) for record in records),
        tables={"table": report.table(records), "table4": report.table4(report.summary(records))},
        page=lambda folder: report.write_report(folder, records, command_line("forecast", recipe, ForecastRecipe)),
        results={"forecast": report.summary(records)},
        redraw=report.redraw,
        shown=("Forecasts of equal size: errors on scaled test data", report.short_table(records)),
    )
