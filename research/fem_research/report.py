"""`fem report`: the trainings of finished runs join the record, from which the pages' tables and pictures are drawn."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from filelock import FileLock

from fem.provenance import CONFIG, PAGE, RESULTS, first_line, note
from fem.train.checkpoints import LOCK, checkpoints
from fem_research.page_tables import TABLE, fill
from fem_research.record import append
from fem_research.runs.run import check_output, without_folders

COMMAND = re.compile(r"^`((?:fem|make|python) [^`]*)` on ", re.MULTILINE)


class Broken(Exception):
    """A run whose files cannot be read."""


def read_run(path: Path) -> dict:
    """The JSON object in a run's file. Raises `Broken` where there is none."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Broken(f"{str(path)!r} cannot be read: {first_line(error)}") from error
    if not isinstance(data, dict):
        raise Broken(f"{str(path)!r} holds no JSON object")
    return data


def run_name(run: Path) -> str:
    """The name of a run in the record, that of its folder."""
    return re.sub(r"\W", "_", run.name)


def require_ended(run: Path) -> None:
    """Raises ValueError unless the folder is that of a run that has ended."""
    for name in (PAGE, RESULTS, CONFIG):
        if not (run / name).is_file() and checkpoints(run):
            raise ValueError(
                f"runs must be folders with a page, got the training {str(run)!r}; fem eval --model {run} scores it."
            )
        if not (run / name).is_file():
            raise ValueError(f"runs must be folders of runs that have ended, got {str(run)!r} without {name}.")


def add_run(run: Path, output: Path) -> None:
    """Put the trainings of a run into the record in the folder `output`, in the place of its earlier ones."""
    config, results = read_run(run / CONFIG), read_run(run / RESULTS)
    if not isinstance(config.get("experiment"), str) or not isinstance(recipe := config.get("recipe"), dict):
        raise Broken(f"{str(run / CONFIG)!r} does not say which experiment it is")
    try:
        command = COMMAND.search((run / PAGE).read_text(encoding="utf-8"))
    except ValueError as error:
        raise Broken(f"{str(run / PAGE)!r} is no text in UTF-8") from error
    config["recipe"] = {name: without_folders(x) if isinstance(x, str) else x for name, x in recipe.items()}
    try:
        files = append(output, run_name(run), command[1] if command else "", config, results)
    except KeyError as missing:
        raise Broken(f"{str(run)!r} was made by another version: it has no {missing}") from missing
    if not files:
        raise Broken(f"{str(run)!r} has no trainings for the record: a run of {config['experiment']!r}")


def add_runs(runs: Sequence[Path] | None, output: Path) -> int:
    """Add these runs, or all in runs/ that have ended, and draw the pages again; returns how many runs were added.

    One process at a time changes the record: others wait.
    """
    check_output(output)
    if (output / CONFIG).exists():
        raise ValueError(f"output must be a folder of results, got {str(output)!r} with a run; choose another.")
    drawn = (TABLE.search(page.read_text(encoding="utf-8", errors="replace")) for page in output.glob("*.md"))
    if any(output.glob("[!.]*")) and not (any(output.glob("*.csv")) or any(drawn)):
        raise ValueError(f"output must be a folder of results, got {str(output)!r} without a CSV file of the record.")
    if not runs:
        runs = [path.parent for path in sorted(Path("runs").glob(f"[!.]*/{PAGE}")) if (path.parent / RESULTS).exists()]
        if not runs and not output.is_dir():
            raise ValueError("runs must be named, as no run in 'runs' has ended; give their folders.")
    names = [run_name(run) for run in runs]
    if twice := [str(run) for run, name in zip(runs, names) if names.count(name) > 1]:
        raise ValueError(f"runs must have names of their own in the record, got {' and '.join(twice)}; rename one.")
    for run in runs:
        require_ended(run)
    output.mkdir(parents=True, exist_ok=True)
    added = 0
    with FileLock(output / LOCK):
        for run in runs:
            try:
                add_run(run, output)
                added += 1
            except Broken as broken:
                note(f"{broken}; the run is left out.")
        fill(output)
    return added
