"""`fem report`: finished runs join the record in research/results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(
    runs: Annotated[
        list[Path] | None, typer.Argument(help="Folders of runs; default: all in runs/ that have ended.")
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder of the record and its pages.")] = Path("research/results"),
):
    """Add finished runs to the record, one row a training, and draw the tables and pictures of its pages again."""
    from fem_research.report import add_runs

    typer.echo(f"runs added to the record in {output}: {add_runs(runs, output)}")
