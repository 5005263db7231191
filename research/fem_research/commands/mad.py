"""`fem mad`: six synthetic tasks that probe a mixer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fem.runs.options import recipe_options
from fem_research.mad.recipe import MADRecipe


@recipe_options(MADRecipe)
def command(
    changes: dict,
    output: Annotated[Path | None, typer.Option(help="Folder of the sweep; default: runs/mad-PROFILE.")] = None,
    workers: Annotated[int | None, typer.Option(help="Runs at a time; default: one per core, or four per GPU.")] = None,
):
    """Table 1: six synthetic tasks that probe a mixer (MAD). The same command resumes a stopped sweep."""
    recipe = MADRecipe(**changes)
    from fem_research.mad.experiment import run

    output = output or Path(f"runs/mad-{recipe.profile}")
    run(recipe, output, workers)
    typer.echo(f"written to {output}: report.md, results.json, table and plots")
