"""`fem doctor`: what runs on this machine, by which backend, and what is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

FOLDER = Path("runs/doctor")


def command(
    gpu: Annotated[
        bool, typer.Option("--gpu", help="Check everything against float64, in at most 20 minutes a step.")
    ] = False,
    only: Annotated[str | None, typer.Option(help="With --gpu: some of the steps, separated by commas.")] = None,
    output: Annotated[
        Path | None, typer.Option(help=rf"With --gpu: folder of the page and the figures. \[default: {FOLDER}]")
    ] = None,
):
    """Show what runs on this machine, and why: versions, devices, backends and optional packages."""
    for name, given, why in ("--only", only, "whose steps it names"), ("--output", output, "whose page it holds"):
        if given is not None and not gpu:
            raise ValueError(f"{name} needs --gpu, {why}, got {str(given)!r} without --gpu.")
    if gpu:
        from fem.doctor.card import examine

        output = output or FOLDER
        print(examine(output, only)["verdict"])
        print(f"Page: {output / 'report.md'}")
    else:
        from fem.doctor import show

        show()
