"""`fem train`: a language model from a recipe, on one process or many."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from fem.experiments.common.options import recipe_options
from fem.experiments.lm.recipe import RECIPES, TrainRecipe


@recipe_options(TrainRecipe())
def command(
    changes: dict,
    recipe: Annotated[str, typer.Option(help=f"Where the fields start: {', '.join(RECIPES)}.")] = "laptop",
    output: Annotated[Path, typer.Option(help="Folder of checkpoints, metrics.jsonl and results.json.")] = Path(
        "runs/train"
    ),
    resume: Annotated[
        str | None, typer.Option(help='"auto": go on from the newest complete checkpoint in output, if there is one.')
    ] = None,
):
    """Train a language model, on one process or under torchrun; a stopped run goes on where it was."""
    if recipe not in RECIPES:
        raise ValueError(f"recipe must be one of {', '.join(RECIPES)}; got {recipe!r}.")
    if resume not in (None, "auto"):
        raise ValueError(f"resume must be auto, or left out, got {resume!r}.")
    from transformers.utils.logging import disable_progress_bar

    from fem.experiments.lm.training import run

    disable_progress_bar()
    run(replace(RECIPES[recipe], **changes), output, resume == "auto")
