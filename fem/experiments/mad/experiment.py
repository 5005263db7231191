"""`fem mad`: a sweep over tasks, mixers and seeds that ends in Table 1."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from fem.experiments.common.run import check_output, command_line, open_run, progress
from fem.experiments.common.sweep import finished, sweep
from fem.experiments.common.tables import show_table, write_table
from fem.experiments.mad.recipe import MADRecipe
from fem.experiments.mad.table import SCORES, readable, scored, table1
from fem.experiments.mad.training import train


def run(recipe: MADRecipe, output: Path, workers: int | None = None) -> dict:
    """Run the jobs that have no record in `output`/runs, write table and plots; returns what results.json holds."""
    from fem.experiments.mad import picture
    from fem.experiments.mad.report import summary, write_report

    check_output(output, "mad")
    jobs = recipe.jobs()
    done = finished(jobs, output / "runs")
    missing = [job for job in jobs if job.key not in done]
    with progress() as bars:
        bar = bars.add_task("MAD", total=len(jobs), completed=len(done))
        for record in sweep(missing, output / "runs", train, workers):
            job = record["job"]
            shown = f"MAD: {job['mixer']}, {job['setting']['task']}, seed {job['seed']}"
            bars.update(bar, advance=1, description=f"{shown}: {record['curve'][-1]['micro']:.1%}")
    records = list(finished(jobs, output / "runs").values())
    profile = recipe.fixed
    table = table1(scored(records, profile.score))
    with open_run(output, "mad", recipe) as under_way:
        folder = under_way.folder
        for record in records:
            job = {name: record["job"][name] for name in ("mixer", "initialisation", "learning_rate", "seed")}
            for point in record["curve"]:
                under_way.log(experiment="mad", task=record["job"]["setting"]["task"], **job, **point)
        write_table(folder, "table", table)
        picture.curves(folder / "curves.png", records)
        write_report(folder / "report.md", records, profile, command_line("mad", recipe, MADRecipe()))
        results = under_way.finish({"mad": summary(records)})
        picture.redraw(results, asdict(recipe), folder)
    measured = [row for row in table if row["seeds"]]
    show_table(f"MAD, {recipe.profile} profile: {SCORES[profile.score]}, percent", readable(measured, False))
    return results
