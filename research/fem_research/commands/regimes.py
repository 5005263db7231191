"""`fem regimes`: where the free energy helps, and where it does not."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fem.runs.options import recipe_options
from fem_research.regimes.settings import RegimesRecipe


@recipe_options(RegimesRecipe)
def command(
    changes: dict,
    output: Annotated[Path, typer.Option(help="Folder of the run.")] = Path("runs/regimes"),
    workers: Annotated[int | None, typer.Option(help="Runs at a time; default: one per core, or four per GPU.")] = None,
):
    """Where the free energy helps: extremes, latest values, averages, recall, bags. The same command resumes a run."""
    recipe = RegimesRecipe(**changes)
    from fem_research.regimes.experiment import run

    run(recipe, output, workers)
    typer.echo(f"written to {output}: report.md, results.json, table.csv, scores.png")
