"""Pictures of results, in one small style. Every function writes a PNG file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter, MaxNLocator

STYLE = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#9ca3af",
    "axes.labelcolor": "#374151",
    "axes.grid": True,
    "grid.color": "#e5e7eb",
    "grid.linewidth": 0.6,
    "xtick.color": "#6b7280",
    "ytick.color": "#6b7280",
    "lines.linewidth": 1.8,
    "figure.dpi": 150,
    "legend.frameon": False,
}

GREY = "#9ca3af"

Numbers = Sequence[int | float]
Line = tuple[Numbers, Numbers]
Colours = Mapping[str, str]


@contextmanager
def picture(path: Path, title: str, width: float, height: float, grid: bool = True) -> Iterator[Figure]:
    """A figure of this size in inches under its title, to draw in; it is written when the block ends."""
    with mpl.rc_context(STYLE | {"axes.grid": grid}):
        figure = Figure(figsize=(width, height), layout="constrained")
        figure.suptitle(title, x=0.01, ha="left", fontsize=10)
        yield figure
        FigureCanvasAgg(figure).print_png(path)


@dataclass(frozen=True)
class Panel:
    """One pair of axes. series: by name, one line (x, y) per seed. logarithmic: both axes, x in powers of two."""

    title: str
    x_label: str
    series: Mapping[str, Sequence[Line]]
    logarithmic: bool = False


def learning_curves(path: Path, title: str, panels: Sequence[Panel], colours: Colours) -> None:
    """One line per run in each panel, side by side, and one key for all panels.

    Names with options, such as "FEM/r8", have their mixer's colour: their lines are dashed, with two options dotted.
    """
    with picture(path, title, 4.0 * len(panels) + 1.5, 3.1) as figure:
        key = {}
        for axes, panel in zip(np.atleast_1d(figure.subplots(1, len(panels))), panels):
            for name, lines in panel.series.items():
                look = {"color": colours.get(name, GREY), "linestyle": ("-", "--", ":")[min(name.count("/"), 2)]}
                for x, y in lines:
                    key[name] = axes.plot(x, y, **look)[0]
            axes.set(title=panel.title, xlabel=panel.x_label)
            axes.margins(x=0.02)
            if panel.logarithmic:
                axes.set_xscale("log", base=2)
                axes.set_yscale("log")
                axes.yaxis.set_major_formatter(LogFormatter())
                axes.yaxis.set_minor_formatter(LogFormatter())
            axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
        figure.legend(key.values(), key.keys(), loc="outside right center")


def dots(
    path: Path,
    title: str,
    panels: Mapping[str, Mapping[str, Numbers]],
    colours: Colours,
    floors: Mapping[str, float] | None = None,
    floor: str = "",
) -> None:
    """Scores, {panel: {name: a number per seed}}: one row per name, a dot for each number and a bar at their mean.

    floors: by panel, a score to compare with, drawn as a dashed line; floor: what it is, for the key.
    """
    names = list(dict.fromkeys(name for panel in panels.values() for name in panel))
    label = max(map(len, names)) * 0.085
    width = max(1.9 * len(panels) + label + 0.4, 0.075 * len(title) + 0.3)
    with picture(path, title, width, 0.27 * len(names) + 1.0) as figure:
        for axes, (panel, scores) in zip(
            figure.subplots(1, len(panels), squeeze=False, sharey=True).flat, panels.items()
        ):
            for height, name in enumerate(names):
                values = list(scores.get(name, ()))
                if values:
                    look = {"color": colours.get(name, GREY)}
                    axes.plot(values, [height] * len(values), "o", markersize=4.5, alpha=0.55, **look)
                    axes.vlines(np.mean(values), height - 0.36, height + 0.36, linewidth=2.4, **look)
            if panel in (floors or ()):
                line = axes.axvline(floors[panel], color=GREY, linewidth=1, linestyle=(0, (4, 3)))
                line.set_label(floor)
            axes.set_title(panel)
            axes.xaxis.set_major_locator(MaxNLocator(4))
            axes.set_yticks(range(len(names)), names)
            axes.set_ylim(len(names) - 0.5, -0.5)
        if floor and floors.keys() & panels.keys():
            figure.legend(handles=[line], loc="outside lower right")


Table = tuple[str, np.ndarray, np.ndarray]


def channel_readings(path: Path, title: str, tokens: Sequence[str], heads: Sequence[Table]) -> None:
    """What one position reads in each head, (title, mean, channels): the prior p(i) above, the weight of token i in
    each channel below, a dot at each channel's largest.

    mean (T,): the prior, which is all that an average reads; channels (d, T): one row per channel, drawn in the order
    of the token that each reads most.
    """
    rows = [size for _, _, channels in heads for size in (1.5, len(channels))]
    size = (0.32 * len(tokens) + 1.9, 0.16 * sum(rows) + 0.5 * len(heads) + 1.3)
    with picture(path, title, *size, grid=False) as figure:
        panels = figure.subplots(len(rows), 1, sharex=True, height_ratios=rows)
        for (name, mean, channels), above, below in zip(heads, panels[::2], panels[1::2]):
            top = max(channels.max(), mean.max())
            look = {"cmap": "Blues", "vmin": 0.0, "vmax": top, "aspect": "auto", "interpolation": "nearest"}
            order = np.lexsort((-channels.max(1), channels.argmax(1)))
            above.imshow(mean[None], **look)
            above.set(title=name, yticks=[0], yticklabels=["prior"])
            image = below.imshow(channels[order], **look)
            best = channels[order].argmax(1)
            ink = ["white" if weight > 0.6 * top else "#1e3a5f" for weight in channels[order].max(1)]
            below.scatter(best, range(len(best)), s=7, c=ink)
            below.set(ylabel=f"{len(channels)} channels", yticks=[])
            for axes in (above, below):
                axes.tick_params(axis="x", length=0)
            figure.colorbar(image, ax=[above, below], label="weight", shrink=0.8, pad=0.02)
        below.set_xticks(range(len(tokens)), tokens, rotation=90, fontsize=9, parse_math=False)
