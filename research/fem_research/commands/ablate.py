"""`fem ablate`: what each part of FEM adds to a language model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fem.runs.options import recipe_options
from fem_research.lm.ablate_recipe import AblateRecipe


@recipe_options(AblateRecipe)
def command(
    changes: dict,
    output: Annotated[Path | None, typer.Option(help="Folder of the ablation; default: runs/ablate-PRIOR.")] = None,
):
    """What each part of FEM adds to a language model: the paper's rows, and controls. The same command resumes it."""
    recipe = AblateRecipe(**changes)
    from transformers.utils.logging import disable_progress_bar

    from fem_research.lm.ablate import run

    disable_progress_bar()
    output = output or Path(f"runs/ablate-{recipe.prior}")
    run(recipe, output)
    typer.echo(f"written to {output}: report.md, results.json, tables, loss.png")
