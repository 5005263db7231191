"""`fem inspect`: what each channel of each head of a language model reads from a text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fem.inspect import MOST_TOKENS


def command(
    model: Annotated[str, typer.Option(help="Folder of a model, or the output of fem train or fem demo.")],
    text: Annotated[str, typer.Option(help=f"The text to read, of at most {MOST_TOKENS} tokens.")],
    layers: Annotated[str | None, typer.Option(help='Of the layers of FEM those to show, such as "1,4".')] = None,
    output: Annotated[Path, typer.Option(help="Folder of page, picture and tables.")] = Path("runs/inspect"),
):
    """Draw what each channel of each head reads from a text: a page to explore, a picture, and tables."""
    from transformers.utils.logging import disable_progress_bar

    from fem.inspect.experiment import run

    disable_progress_bar()
    run(model, text, layers, output)
    typer.echo(f"written to {output}: open inspect.html in a browser; inspect.png, heads.csv")
