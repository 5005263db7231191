"""`fem mad`: a sweep over tasks, mixers and seeds that ends in Table 1."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from fem.runs.run import RUNS, check_output, command_line, progress
from fem_research.common.grid import Grid, publish
from fem_research.common.sweep import sweep
from fem_research.mad.report import SCORES, readable, scored, table1
from fem_research.mad.settings import MADRecipe
from fem_research.mad.training import train


def run(recipe: MADRecipe, output: Path, workers: int | None = None) -> dict:
    """Run the jobs that have no record in `output`/runs, write table and plots; returns what results.json holds."""
    from fem_research.mad.report import redraw, summary, write_report

    check_output(output, "mad", recipe)
    train_all = partial(sweep, train=train, workers=workers)
    with progress() as bars:
        records = Grid(output / RUNS, train_all, bars, "MAD", told).records(recipe.jobs())
    profile = recipe.fixed
    table = table1(scored(records, profile.score))
    return publish(
        output,
        "mad",
        recipe,
        records,
        ("task", "mixer", "initialisation", "learning_rate", "seed"),
        tables={"table": table},
        page=lambda folder: write_report(folder, records, profile, command_line("mad", recipe, MADRecipe())),
        results={"mad": summary(records)},
        redraw=redraw,
        shown=(
            f"MAD, {recipe.profile} profile: {SCORES[profile.score]}, percent",
            readable([row for row in table if row["seeds"]], False),
        ),
    )


def told(record: dict) -> str:
    job = record["job"]
    return f": {job['mixer']}, {job['setting']['task']}, seed {job['seed']}: {record['curve'][-1]['micro']:.1%}"
