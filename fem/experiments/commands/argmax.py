"""`fem argmax`: can one read fetch every channel's maximum?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fem.experiments.argmax.settings import FULL, ArgmaxRecipe
from fem.experiments.common.options import recipe_options


@recipe_options(ArgmaxRecipe)
def command(
    changes: dict,
    full: Annotated[bool, typer.Option("--full", help="The paper's size: T=128, D=512, 2000 steps.")] = False,
    output: Annotated[Path, typer.Option(help="Folder of the run.")] = Path("runs/argmax"),
):
    """Can one read fetch every channel's maximum? FEM against softmax attention (Appendix P)."""
    recipe = ArgmaxRecipe(**(FULL if full else {}) | changes)
    from fem.experiments.argmax.experiment import run

    run(recipe, output)
    typer.echo(f"written to {output}")
