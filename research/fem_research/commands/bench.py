"""`fem bench`: time and memory beside attention of equal weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fem.runs.options import recipe_options
from fem_research.bench.cases import BenchRecipe


@recipe_options(BenchRecipe)
def command(
    changes: dict,
    output: Annotated[Path, typer.Option(help="Folder of the run.")] = Path("runs/bench"),
):
    """What FEM costs beside attention of equal weights: read, layer, Tables 5 and 7, decode, served, context."""
    recipe = BenchRecipe(**changes)
    from fem_research.bench.experiment import run

    run(recipe, output)
    typer.echo(f"written to {output}: report.md, tables, results.json")
