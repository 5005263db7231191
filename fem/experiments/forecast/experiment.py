"""`fem forecast`: forecasters of equal size that differ in their mixer alone, and the peers of neuralforecast."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from fem.experiments.common.options import recipe_options
from fem.experiments.common.run import command_line, cpu_threads, open_run, progress, write_json
from fem.experiments.common.tables import show_table, write_table
from fem.experiments.forecast.settings import LAPTOP, PROFILES, ForecastRecipe


def run(recipe: ForecastRecipe, output: Path) -> dict:
    """Train what `output`/runs does not have yet, then write tables, plots and report; returns what results.json holds.

    Raises ValueError on data that cannot be trained on, before any training.
    """
    if output.exists() and not output.is_dir():
        raise ValueError(f"output must be a folder, got the file {str(output)!r}; choose another name.")
    from fem.experiments.forecast import report
    from fem.experiments.forecast.training import train

    jobs = recipe.jobs()
    if any(job.is_peer for job in jobs):
        from fem.experiments.forecast.baselines import train_peer
    runs = output / "runs"
    records = []
    with cpu_threads(recipe.threads), progress() as bars:
        for job in jobs:
            path = runs / f"{job.key}.json"
            if not path.exists():
                checkpoint = path.with_suffix(".pt")
                record = train_peer(job, bars) if job.is_peer else train(job, checkpoint, bars)
                path.parent.mkdir(parents=True, exist_ok=True)
                write_json(path, record)
                checkpoint.unlink(missing_ok=True)
            records.append(json.loads(path.read_text(encoding="utf-8")))
    with open_run(output, "forecast", recipe) as under_way:
        for record in records:
            found = {name: record[name] for name in ("data", "horizon", "model", "seed")}
            for point in record["curve"]:
                under_way.log(experiment="forecast", **found, **point)
        write_table(under_way.folder, "table", report.table(records))
        report.write(under_way.folder, records, command_line("forecast", recipe, LAPTOP))
        results = under_way.finish({"forecast": report.summary(records)})
    show_table("Forecasts of equal size: errors on scaled test data", report.short_table(records))
    return results


@recipe_options(LAPTOP)
def command(
    changes: dict,
    profile: Annotated[str, typer.Option(help=f"Where the options start: {' or '.join(PROFILES)}.")] = "laptop",
    output: Annotated[Path | None, typer.Option(help="Folder of the runs; default: runs/forecast-PROFILE.")] = None,
):
    """Table 4: FEM as a forecaster of time series, at equal parameters. Stopped runs go on where they were."""
    if profile not in PROFILES:
        raise ValueError(f"profile must be {' or '.join(PROFILES)}, got {profile!r}.")
    output = output or Path(f"runs/forecast-{profile}")
    run(replace(PROFILES[profile], **changes), output)
    typer.echo(f"written to {output}: report.md, results.json, tables and plots")
