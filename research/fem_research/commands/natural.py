"""`fem natural`: which pooling gives sets and series their natural labels."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fem.runs.options import recipe_options
from fem_research.natural.settings import NaturalRecipe


@recipe_options(NaturalRecipe)
def command(
    changes: dict,
    output: Annotated[Path, typer.Option(help="Folder of the run.")] = Path("runs/natural"),
    workers: Annotated[int | None, typer.Option(help="Runs at a time; default: one per core, or four per GPU.")] = None,
):
    """Pool sets with natural labels: molecules, pictures, recordings. The same command resumes a run."""
    recipe = NaturalRecipe(**changes)
    from fem_research.natural.experiment import run

    run(recipe, output, workers)
    typer.echo(f"written to {output}: report.md, results.json, table.csv, scores.png")
