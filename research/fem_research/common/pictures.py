"""Pictures of comparisons: mixers by the names that a reader sees, in their colours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from fem_research.common.names import FORECASTERS, colour, display
from fem_research.common.plots import Panel, dots, learning_curves

Curves = Mapping[str, Sequence[Sequence[Mapping]]]  # by mixer, then by seed: points


def scores(path: Path, rows: Sequence[Mapping]) -> None:
    """A dot for the score of every training, from rows of the record: a panel per task, a line per mixer."""
    starts = {row.get("initialisation") for row in rows}
    panels: dict[str, dict[str, list[float]]] = {}
    colours = {}
    for row in rows:
        if row.get("score") is not None:
            label = FORECASTERS.get(row["mixer"], row["mixer"])
            label += "" if len(starts) == 1 else f", {row['initialisation']}"
            panel = ", ".join(str(row[name]) for name in ("task", "horizon") if name in row)
            panels.setdefault(panel, {}).setdefault(label, []).append(row["score"])
            colours[label] = colour(row["mixer"])
    dots(path, "Score of every training", panels, colours)


def curves(path: Path, title: str, found: Curves, panels: Sequence[tuple[str, str, str, str]], **look: bool) -> None:
    """A line per seed of every mixer. panels: title, label of the x-axis, and a point's fields for x and y."""
    drawn = [
        Panel(
            panel,
            label,
            {
                display(mixer): [tuple(zip(*((p[x], p[y]) for p in seed))) for seed in seeds]
                for mixer, seeds in found.items()
            },
            **look,
        )
        for panel, label, x, y in panels
    ]
    learning_curves(path, title, drawn, _colours(found))


def _colours(mixers) -> dict[str, str]:
    return {display(mixer): colour(mixer) for mixer in mixers}
