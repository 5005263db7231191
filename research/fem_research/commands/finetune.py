"""`fem finetune`: does FEM help a trained model?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fem.runs.options import recipe_options
from fem_research.lm.finetune_recipe import FinetuneRecipe


@recipe_options(FinetuneRecipe)
def command(
    changes: dict,
    output: Annotated[Path | None, typer.Option(help="Folder of the run; default: runs/finetune-ARCHITECTURE.")] = None,
) -> None:
    """Train a small GPT-2 or Llama further, as it is and with FEM in its attention, on the same sequences."""
    recipe = FinetuneRecipe(**changes)
    from fem_research.lm.finetune import run

    output = output or Path(f"runs/finetune-{recipe.architecture}")
    run(recipe, output)
    typer.echo(f"written to {output}: report.md, results.json, table.csv")
