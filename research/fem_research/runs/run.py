"""The frame of every experiment: a recipe goes in, a folder of results comes out.

A recipe is a frozen dataclass that says what is computed, and nothing about where. A run's folder holds config.json
(recipe, versions, seed, hardware, date), metrics.jsonl (one line per measurement), results.json, tables and plots.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column

from fem import provenance
from fem.commands.options import called
from fem.provenance import CONFIG, PAGE, RESULTS, circumstances, versions, write_json
from fem.train.checkpoints import one_writer

RUNS = "runs"  # in the folder of a comparison: the records of its trainings


class Run:
    """A run under way, which writes its files to `folder`."""

    def __init__(self, folder: Path, seed: int):
        self.folder = folder
        self.seed = seed

    def log(self, **metrics) -> None:
        """Append one measurement to metrics.jsonl."""
        with open(self.folder / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(metrics) + "\n")

    def finish(self, results: dict) -> dict:
        """Write the results to results.json, with versions and seed; returns them."""
        results = results | {"versions": versions(), "seed": self.seed}
        write_json(self.folder / RESULTS, results)
        return results


def check_output(output: Path, experiment: str | None = None, recipe: Any = None) -> None:
    """`fem.provenance.check_output`, and with a recipe ValueError where the run is of another one.

    A folder of trainings (`RUNS`) may be without a config.json yet, and be widened by another recipe of its experiment,
    which keeps them.
    """
    trainings = (output / RUNS).is_dir()
    if not trainings or any((output / name).exists() for name in (CONFIG, RESULTS, PAGE)):
        provenance.check_output(output, experiment)
    config = provenance.read_json(output / CONFIG)
    if recipe is None or trainings or config is None or not isinstance(stored := config.get("recipe"), dict):
        return
    wanted = json.loads(json.dumps(asdict(recipe), default=str))
    changed = [f"{name} ({stored[name]!r} there, {x!r} here)" for name, x in wanted.items() if stored.get(name, x) != x]
    if changed:
        raise ValueError(
            f"output must not hold the results of another recipe, got {str(output)!r} with "
            f"{', '.join(changed)}; choose another."
        )


@contextmanager
def open_run(output: Path, experiment: str, recipe) -> Iterator[Run]:
    """A run of `recipe`. Its files are moved to `output` when the block ends, results.json last.

    Files of the same recipe's earlier run are replaced; a run that fails or is stopped leaves them as they were.
    Raises ValueError where `output` holds anything else (`check_output`) or another process writes to it, TypeError if
    `recipe` is no dataclass.
    """
    if not is_dataclass(recipe):
        raise TypeError(f"recipe must be a dataclass, got {type(recipe).__name__}.")
    check_output(output, experiment, recipe)
    output = output.absolute()
    output.parent.mkdir(parents=True, exist_ok=True)
    beside = output if output.is_dir() else output.parent  # on the disk of the output, which may be a mount of its own
    place = beside / f".{output.name}-under-way"
    place.mkdir(exist_ok=True)
    with one_writer(place):
        run = Run(place / RUNS, recipe.seed)
        shutil.rmtree(run.folder, ignore_errors=True)  # of a run that was killed
        try:
            run.folder.mkdir()
            config = {"experiment": experiment, "recipe": asdict(recipe), "seed": recipe.seed}
            write_json(run.folder / CONFIG, config | circumstances())
            yield run
            _publish(run.folder, output)
        finally:
            shutil.rmtree(place, ignore_errors=True)


def _publish(staging: Path, output: Path) -> None:
    files = [path for path in staging.rglob("*") if path.is_file()]
    for path in sorted(files, key=lambda path: path.name == RESULTS):
        target = output / path.relative_to(staging)
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(path, target)


def command_line(experiment: str, recipe, start, profile: str | None = None) -> str:
    """The command that runs `recipe`, with an option for every field that differs from `start`, the command's defaults.

    Of files, only the names are given.
    """
    words = ["fem", experiment] if profile is None else ["fem", experiment, "--profile", profile]
    for part in fields(recipe):
        value, name = getattr(recipe, part.name), called(part)
        if value is None or value == getattr(start, part.name):
            continue
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        else:
            text = without_folders(str(value))
            shown = part.metadata["shown"]
            words += [f"--{name}", text if shown is None else shown(text)]
    return shlex.join(words)


def without_folders(text: str) -> str:
    """A value of a recipe, or several with commas, with files called by name: the folders are this machine's own."""
    return ",".join(map(_file_name, text.split(",")))


def _file_name(text: str) -> str:
    path = Path(text)
    return path.name if path.is_absolute() or (os.sep in text and path.exists()) else text


class Lines(Progress):
    """Progress without a terminal: a line whenever a task gets a new description, as it does at every evaluation."""

    def update(self, task_id: TaskID, *, description: str | None = None, **changes) -> None:
        task = next(task for task in self.tasks if task.id == task_id)
        news = description is not None and description != task.description
        super().update(task_id, description=description, **changes)
        if news:
            where = f"({task.completed:.0f}/{task.total or 0:.0f})"
            self.console.print(f"{description} {where}", soft_wrap=True, markup=False, highlight=False)

    def stop(self) -> None:
        """End without a word: rich before 14.3 writes an empty line."""


def progress() -> Progress:
    """Steps and time left on standard error, at the end the time taken: a bar on a terminal, else a line per
    evaluation. A line fits 80 columns, where no number is cut."""
    console = Console(stderr=True)
    if not console.is_terminal:
        return Lines(console=console, disable=True)
    return Progress(
        TextColumn("{task.description}", table_column=Column(overflow="fold")),
        BarColumn(bar_width=12),
        MofNCompleteColumn(),
        TimeRemainingColumn(compact=True, elapsed_when_finished=True),
        console=console,
    )
