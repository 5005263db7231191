"""`fem vision`: image classifiers of equal size that differ in their mixer alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fem.runs.options import recipe_options
from fem.runs.recipes import require_one_of
from fem_research.vision.settings import PROFILES, VisionRecipe


@recipe_options(VisionRecipe)
def command(
    changes: dict,
    profile: Annotated[str, typer.Option(help=f"Defaults of all other options: {', '.join(PROFILES)}.")] = "digits",
    output: Annotated[Path | None, typer.Option(help="Folder of the runs; default: runs/vision-PROFILE.")] = None,
):
    """Table 3: FEM in place of DeiT's attention, at equal parameters. The same command resumes a stopped run."""
    require_one_of("profile", profile, PROFILES)
    output = output or Path(f"runs/vision-{profile}")
    recipe = VisionRecipe(**PROFILES[profile] | changes)
    from fem_research.vision.experiment import run

    run(recipe, output, profile)
    typer.echo(f"written to {output}: report.md, results.json, table, plot and models")
