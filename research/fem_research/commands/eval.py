"""`fem eval`: scores of a language model by lm-evaluation-harness."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fem.commands.options import recipe_options
from fem_research.lm.eval import EvalRecipe, run


@recipe_options(EvalRecipe)
def command(
    changes: dict,
    output: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("runs/eval"),
):
    """Score a language model with lm-evaluation-harness: the paper's suite, or any tasks."""
    if run(EvalRecipe(**changes), output):  # of torchrun's processes, the first
        typer.echo(f"written to {output}: report.md, results.json, table.csv")
