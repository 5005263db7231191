"""`fem demo`: what FEM does, in a few minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fem.runs.options import recipe_options
from fem_research.demo.settings import DemoRecipe


@recipe_options(DemoRecipe)
def command(
    changes: dict,
    output: Annotated[Path, typer.Option(help="Folder of the run.")] = Path("runs/demo"),
):
    """What FEM does, in minutes: the argmax task, two language models on real text, a look inside."""
    recipe = DemoRecipe(**changes)
    from transformers.utils.logging import disable_progress_bar

    from fem_research.demo.experiment import run

    disable_progress_bar()
    run(recipe, output)
    typer.echo(
        f"""written to {output}: report.md, inspect.html, results.json, plots, and the model. Next:
  fem generate --model {output} --prompt "The class"             what the model writes
  fem inspect --model {output} --text "A list is a sequence."    which token each channel reads, in a text of yours
  fem train --data FILE --output runs/mine                      a model of your own text"""
    )
