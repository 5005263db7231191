"""Pictures of results, in one small style. Every function writes a PNG file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter

COLOURS = {"fem": "#1f5fbf", "softmax": "#e07b39"}
OTHERS = ("#3a9d6b", "#8b5fbf", "#c2477f", "#6b7280", "#b8972f", "#2aa5b8")
NAMES = {"fem": "FEM", "softmax": "softmax attention"}
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

Numbers = Sequence[int | float]
Line = tuple[Numbers, Numbers]
Series = dict[str, Line]


@dataclass(frozen=True)
class Panel:
    """One pair of axes: a line per series, its name a run's; `level` draws a horizontal line to compare with.

    logarithmic: both axes, the lower one by powers of two.
    """

    title: str
    x_label: str
    series: Series
    level: float | None = None
    level_name: str = ""
    logarithmic: bool = False


def learning_curves(path: Path, title: str, panels: Sequence[Panel]) -> None:
    """One line per run in each panel, side by side; a name such as "fem, seed 1" takes the colour of "fem"."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(4.2 * len(panels), 3.1), layout="constrained")
        figure.suptitle(title, x=0.01, ha="left", fontsize=10)
        for axes, panel in zip(np.atleast_1d(figure.subplots(1, len(panels))), panels):
            families = list(dict.fromkeys(_family(name) for name in panel.series))
            for name, (x, y) in panel.series.items():
                family = _family(name)
                colour = COLOURS.get(family, OTHERS[families.index(family) % len(OTHERS)])
                seen = any(line.get_label() == NAMES.get(family, family) for line in axes.lines)
                axes.plot(x, y, color=colour, label="_" if seen else NAMES.get(family, family))
            if panel.level is not None:
                axes.axhline(panel.level, color="#9ca3af", linewidth=1, linestyle=(0, (4, 3)), label=panel.level_name)
            axes.set(title=panel.title, xlabel=panel.x_label)
            axes.margins(x=0.02)
            if panel.logarithmic:
                axes.set_xscale("log", base=2)
                axes.set_yscale("log")
                axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
                axes.yaxis.set_major_formatter(LogFormatter())
                axes.yaxis.set_minor_formatter(LogFormatter())
            else:
                axes.legend()
        if panel.logarithmic:
            figure.legend(*axes.get_legend_handles_labels(), loc="outside right center")
        _save(figure, path)


def mean_curves(path: Path, title: str, x_label: str, y_label: str, groups: dict[str, Sequence[Line]]) -> None:
    """A group's runs thin, their mean thick; the legend is in the order in which the means end, the highest first."""
    ends = {name: float(np.mean([y[-1] for _, y in lines])) for name, lines in groups.items()}
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 4.2), layout="constrained")
        figure.suptitle(title, x=0.01, ha="left", fontsize=10)
        axes = figure.subplots()
        colours = mpl.colormaps["tab10" if len(groups) <= 10 else "tab20"].colors
        for rank, name in enumerate(sorted(groups, key=ends.get, reverse=True)):
            colour = colours[rank % len(colours)]
            for x, y in groups[name]:
                axes.plot(x, y, color=colour, linewidth=0.6, alpha=0.35)
            mean = np.mean([y for _, y in groups[name]], axis=0)
            axes.plot(groups[name][0][0], mean, color=colour, label=f"{name}  {ends[name]:.3f}")
        axes.set(xlabel=x_label, ylabel=y_label)
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
        axes.margins(x=0.02)
        figure.legend(loc="outside right center")
        _save(figure, path)


def _family(name: str) -> str:
    return name.partition(",")[0]


def channel_reading(path: Path, title: str, tokens: Sequence[str], mean: np.ndarray, channels: np.ndarray) -> None:
    """What one position reads: the shared prior p(i) above, the weight of token i in each channel below.

    mean (T,): the prior, which is all that an average reads; channels (d, T): one row per channel, drawn in the order
    of the token that each reads most.
    """
    order = np.lexsort((-channels.max(1), channels.argmax(1)))
    top = max(channels.max(), mean.max())
    with mpl.rc_context(STYLE | {"axes.grid": False}):
        size = (0.32 * len(tokens) + 1.9, 0.16 * len(channels) + 1.9)
        figure = Figure(figsize=size, layout="constrained")
        figure.suptitle(title, x=0.01, ha="left", fontsize=9)
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(1.4, len(channels)))
        look = {"cmap": "Blues", "vmin": 0.0, "vmax": top, "aspect": "auto", "interpolation": "nearest"}
        above.imshow(mean[None], **look)
        image = below.imshow(channels[order], **look)
        above.set_yticks([0], ["prior"])
        above.tick_params(axis="x", length=0)
        below.set_ylabel(f"{len(channels)} channels")
        below.set_yticks([])
        below.set_xticks(range(len(tokens)), tokens, rotation=90, family="monospace", fontsize=8, parse_math=False)
        figure.colorbar(image, ax=[above, below], label="weight of the token", shrink=0.8, pad=0.02)
        _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    FigureCanvasAgg(figure).print_png(path)
