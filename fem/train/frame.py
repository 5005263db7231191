"""The files of a training besides its checkpoints, and its progress on standard error."""

from __future__ import annotations

import json
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fem.provenance import RESULTS, versions, write_json


class Run:
    """A run under way, which writes its files to `folder`."""

    def __init__(self, folder: Path, seed: int):
        self.folder = folder
        self.seed = seed
        self.started = time.monotonic()

    def log(self, **metrics) -> None:
        """Append one measurement to metrics.jsonl."""
        with open(self.folder / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(metrics) + "\n")

    def finish(self, results: dict) -> dict:
        """Write the results to results.json, with versions, seed and the seconds since the last start; returns them."""
        seconds = round(time.monotonic() - self.started, 1)
        results = results | {"versions": versions(), "seed": self.seed, "seconds": seconds}
        write_json(self.folder / RESULTS, results)
        return results


def progress() -> Progress:
    """Steps, time taken and time left on standard error, where it is a terminal."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("taken,"),
        TimeRemainingColumn(),
        TextColumn("left"),
        console=console,
        disable=not console.is_terminal,
    )
