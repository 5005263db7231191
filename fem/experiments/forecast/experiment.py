"""`fem forecast`: forecasters of equal size that differ in their mixer alone, and the baselines of neuralforecast."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from pathlib import Path

from fem.experiments.common.jobs import read_record
from fem.experiments.common.lock import one_writer
from fem.experiments.common.run import check_output, command_line, cpu_threads, open_run, progress, write_json
from fem.experiments.common.tables import show_table, write_table
from fem.experiments.forecast.settings import ForecastRecipe


def run(recipe: ForecastRecipe, output: Path) -> dict:
    """Run the jobs without a record in `output`/runs, write tables, plots, report; returns what results.json holds.

    Raises ValueError on data that cannot be trained on, before any training.
    """
    check_output(output, "forecast")
    from fem.experiments.forecast import picture, report
    from fem.experiments.forecast.training import train

    jobs = recipe.jobs()
    if any(job.is_baseline for job in jobs):
        from fem.experiments.forecast.baselines import train_baseline
    runs = output / "runs"
    records = []
    with cpu_threads(recipe.threads), progress() as bars:
        for job in jobs:
            path = runs / f"{job.key}.json"
            record = read_record(path)
            if record is None:
                folder = runs / job.key
                folder.mkdir(parents=True, exist_ok=True)
                with one_writer(folder):
                    record = train_baseline(job, bars) if job.is_baseline else train(job, folder, bars)
                    write_json(path, record)
                shutil.rmtree(folder)
                (runs / f"{job.key}.pt").unlink(missing_ok=True)  # of earlier versions
            records.append(record)
    with open_run(output, "forecast", recipe) as under_way:
        for record in records:
            found = {name: record[name] for name in ("data", "horizon", "model", "seed")}
            for point in record["curve"]:
                under_way.log(experiment="forecast", **found, **point)
        write_table(under_way.folder, "table", report.table(records))
        report.write(under_way.folder, records, command_line("forecast", recipe, ForecastRecipe))
        results = under_way.finish({"forecast": report.summary(records)})
        picture.redraw(results, asdict(recipe), under_way.folder)
    show_table("Forecasts of equal size: errors on scaled test data", report.short_table(records))
    return results
