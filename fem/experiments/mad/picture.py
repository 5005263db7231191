"""Pictures of a sweep: learning curves by task, and every seed's score."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import cycle
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from fem.experiments.mad.table import COLUMNS, SCORES, Row, baseline_runs, by_row, task_scores
from fem.plots import COLOURS, OTHERS, STYLE

OWN_LOOKS = {"softmax+CLTG": (COLOURS["fem"], "-"), "softmax": (COLOURS["softmax"], "-")}
OTHER_LOOKS = [(colour, line) for line in ("-", "--", ":", "-.") for colour in OTHERS]
ROWS_WITH_RANGES = 4


def curves(path: Path, records: Sequence[dict]) -> None:
    """Test accuracy over steps in the first setting of each task: mean over seeds, and the range of few mixers."""
    tasks, rows = _tasks(records), by_row(records)
    looks = _looks(rows)
    several = len(rows) > ROWS_WITH_RANGES
    columns = min(3, len(tasks))
    lines = -(-len(tasks) // columns)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(3.4 * columns + 2.2, 2.6 * lines + 0.4), layout="constrained")
        shown = "mean over seeds" if several else "mean and range over seeds"
        figure.suptitle(f"Accuracy on new sequences: {shown}", x=0.01, ha="left", fontsize=10)
        panels = figure.subplots(lines, columns, squeeze=False).flat
        for task, axes in zip(tasks, panels):
            for row, own in rows.items():
                colour, line = looks[row]
                runs = [record["curve"] for record in baseline_runs(own, task)]
                if runs:
                    steps = [point["step"] for point in runs[0]]
                    accuracy = np.array([[point["micro"] for point in run] for run in runs])
                    axes.plot(steps, accuracy.mean(0), line, color=colour, label=_label(row, rows))
                    if not several:
                        axes.fill_between(steps, accuracy.min(0), accuracy.max(0), color=colour, alpha=0.12, lw=0)
            axes.set(title=task, xlabel="step", ylim=(0, 1.03))
        for axes in panels:
            axes.remove()
        shown = {label: line for axes in figure.axes for line, label in zip(*axes.get_legend_handles_labels())}
        figure.legend(shown.values(), shown.keys(), loc="outside right center")
        figure.savefig(path)


def scores(path: Path, records: Sequence[dict], score: str) -> None:
    """A dot for each seed of each mixer in each task; the bar is their mean."""
    tasks, rows = _tasks(records), by_row(records)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(1.7 * len(tasks) + 2, 0.26 * len(rows) + 1.1), layout="constrained")
        figure.suptitle(f"{SCORES[score].capitalize()}: a dot per seed", x=0.01, ha="left", fontsize=10)
        for axes, task in zip(figure.subplots(1, len(tasks), squeeze=False, sharey=True).flat, tasks):
            for height, own in enumerate(rows.values()):
                found = task_scores(own, score).get(task, [])
                axes.plot(found, [height] * len(found), "o", color=OTHERS[3], markersize=4, alpha=0.7)
                if found:
                    axes.vlines(np.mean(found), height - 0.35, height + 0.35, color=COLOURS["fem"], linewidth=2)
            axes.set_title(COLUMNS[task])
            axes.set_yticks(range(len(rows)), [_label(row, rows) for row in rows])
            axes.set_ylim(len(rows) - 0.5, -0.5)
        figure.savefig(path)


def _looks(rows: Iterable[Row]) -> dict[Row, tuple[str, str]]:
    """Colour and line: those of the whole library for its two protagonists, others in turn."""
    others = cycle(OTHER_LOOKS)
    protagonists = {row: OWN_LOOKS[row[0]] for row in rows if row[0] in OWN_LOOKS and row[1] == "normal"}
    return {row: protagonists.get(row) or next(others) for row in rows}


def _tasks(records: Sequence[dict]) -> list[str]:
    run = {record["job"]["setting"]["task"] for record in records}
    return [task for task in COLUMNS if task in run]


def _label(row: Row, rows: dict[Row, list[dict]]) -> str:
    mixer, initialisation = row
    several = len({initialisation for _, initialisation in rows}) > 1
    return f"{mixer}, {initialisation} init" if several else mixer
