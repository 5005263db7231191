"""Pictures of comparisons: mixers by the names that a reader sees, in their colours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from fem_research.common.names import colour, display
from fem_research.common.plots import Panel, dots, learning_curves

Curves = Mapping[str, Sequence[Sequence[Mapping]]]  # by mixer, then by seed: points


def scores(
    path: Path,
    title: str,
    panels: Mapping[str, Mapping[str, Sequence[float]]],
    floors: Mapping[str, float] | None = None,
    floor: str = "",
) -> None:
    """A dot for every number, {panel: {mixer: a number per seed}}, and `floors` as `plots.dots` draws them."""
    named = {panel: {display(mixer): numbers for mixer, numbers in rows.items()} for panel, rows in panels.items()}
    dots(path, title, named, _colours(mixer for rows in panels.values() for mixer in rows), floors, floor)


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
