"""`fem argmax`: can one read fetch every channel's maximum?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fem.runs.options import recipe_options
from fem_research.argmax.settings import FULL, ArgmaxRecipe


@recipe_options(ArgmaxRecipe)
def command(
    changes: dict,
    full: Annotated[bool, typer.Option("--full", help="The paper's size: T=128, D=512, 2000 steps.")] = False,
    output: Annotated[Path, typer.Option(help="Folder of the run.")] = Path("runs/argmax"),
):
    """Can one read fetch every channel's maximum? FEM against softmax attention (Appendix P)."""
    recipe = ArgmaxRecipe(**(FULL if full else {}) | changes)
    from fem_research.argmax.experiment import run

    run(recipe, output)
    typer.echo(f"written to {output}")
