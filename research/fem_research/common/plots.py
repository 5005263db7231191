"""Pictures of experiments: scores and curves of several mixers over several seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.ticker import LogFormatter, MaxNLocator

from fem.plots import GREY, picture

Numbers = Sequence[int | float]
Line = tuple[Numbers, Numbers]
Colours = Mapping[str, str]


@dataclass(frozen=True)
class Panel:
    """One pair of axes. series: by name, one line (x, y) per seed. logarithmic: both axes, x in powers of two."""

    title: str
    x_label: str
    series: Mapping[str, Sequence[Line]]
    logarithmic: bool = False


def learning_curves(path: Path, title: str, panels: Sequence[Panel], colours: Colours) -> None:
    """One line per run in each panel, one below the other as a phone shows them, and one key below all panels.

    Names with options, such as "FEM/r8", have their mixer's colour: their lines are dashed, with two options dotted.
    """
    names = dict.fromkeys(name for panel in panels for name in panel.series)
    with picture(path, title, 5.0, 2.5 * len(panels) + 0.1 * len(names) + 0.5) as figure:
        key = {}
        for axes, panel in zip(np.atleast_1d(figure.subplots(len(panels), 1)), panels):
            if panel.logarithmic:  # first: linear limits of a panel without a number are none of a logarithm's
                axes.set_xscale("log", base=2)
                axes.set_yscale("log")
            for name, lines in panel.series.items():
                look = {"color": colours.get(name, GREY), "linestyle": ("-", "--", ":")[min(name.count("/"), 2)]}
                for x, y in lines:
                    key[name] = axes.plot(x, y, **look)[0]
            axes.set(title=panel.title, xlabel=panel.x_label)
            axes.margins(x=0.02)
            if panel.logarithmic:
                axes.yaxis.set_major_formatter(LogFormatter())
                axes.yaxis.set_minor_formatter(LogFormatter())
            axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.10g}")
        figure.legend(key.values(), key.keys(), loc="outside lower center", ncols=2)


def dots(
    path: Path,
    title: str,
    panels: Mapping[str, Mapping[str, Numbers]],
    colours: Colours,
) -> None:
    """Scores, {panel: {name: a number per seed}}: one row per name, a dot for each number and a bar at their mean.

    Panels stand three abreast, so that they can be read on a page.
    """
    names = list(dict.fromkeys(name for panel in panels.values() for name in panel))
    abreast = min(len(panels), 2 if len(panels) == 4 else 3)
    down = math.ceil(len(panels) / abreast)
    width = max(1.9 * abreast + max(map(len, names)) * 0.085 + 0.4, 0.075 * len(title) + 0.3)
    with picture(path, title, width, down * (0.27 * len(names) + 0.6) + 0.4) as figure:
        places = [*figure.subplots(down, abreast, squeeze=False, sharey=True).flat]
        for axes in places[len(panels) :]:
            axes.set_axis_off()
        for axes, (panel, scores) in zip(places, panels.items()):
            for height, name in enumerate(names):
                values = list(scores.get(name, ()))
                if values:
                    look = {"color": colours.get(name, GREY)}
                    axes.plot(values, [height] * len(values), "o", markersize=4.5, alpha=0.55, **look)
                    axes.vlines(np.mean(values), height - 0.36, height + 0.36, linewidth=2.4, **look)
            axes.set_title(panel)
            axes.xaxis.set_major_locator(MaxNLocator(4))
            axes.set_yticks(range(len(names)), names)
            axes.set_ylim(len(names) - 0.5, -0.5)
