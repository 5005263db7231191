"""`fem report`: finished runs become pages in research/results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fem_research.report import add_pages, redraw


def command(
    runs: Annotated[
        list[Path] | None, typer.Argument(help="Folders of runs; default: all in runs/ that have ended.")
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder of the pages.")] = Path("research/results"),
    redraw_only: Annotated[
        bool, typer.Option("--redraw", help="Draw the pictures of all pages again, from their numbers; run nothing.")
    ] = False,
):
    """Join finished runs into pages beside the paper's tables, blank where nothing was run."""
    if redraw_only:
        typer.echo("\n".join(redraw(output)))
    else:
        typer.echo(f"{add_pages(runs, output)} runs; written to {output}/README.md")
