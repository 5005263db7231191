"""`fem forecast`: forecasters of equal size that differ in their mixer alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fem.runs.options import recipe_options
from fem.runs.recipes import require_one_of
from fem_research.forecast.settings import PROFILES, ForecastRecipe


@recipe_options(ForecastRecipe)
def command(
    changes: dict,
    profile: Annotated[str, typer.Option(help=f"Defaults of all other options: {' or '.join(PROFILES)}.")] = "laptop",
    output: Annotated[Path | None, typer.Option(help="Folder of the runs; default: runs/forecast-PROFILE.")] = None,
):
    """Table 4: FEM as a forecaster of time series, at equal parameters. The same command resumes a stopped run."""
    require_one_of("profile", profile, PROFILES)
    output = output or Path(f"runs/forecast-{profile}")
    recipe = ForecastRecipe(**PROFILES[profile] | changes)
    from fem_research.forecast.experiment import run

    run(recipe, output)
    typer.echo(f"written to {output}: report.md, results.json, tables and plots")
