"""Pictures of results, in one small style. Every function writes a PNG file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

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


@contextmanager
def picture(path: Path, title: str, width: float, height: float, grid: bool = True) -> Iterator[Figure]:
    """A figure of this size in inches under its title, to draw in; it is written when the block ends."""
    with mpl.rc_context(STYLE | {"axes.grid": grid}):
        figure = Figure(figsize=(width, height), layout="constrained")
        figure.suptitle(title, x=0.01, ha="left", fontsize=10)
        yield figure
        FigureCanvasAgg(figure).print_png(path)


Table = tuple[str, np.ndarray, np.ndarray]


def channel_readings(path: Path, title: str, tokens: Sequence[str], heads: Sequence[Table]) -> None:
    """Draw what one position reads in each head, (title, mean, channels): the prior p(i) above, the weight of token i
    in each channel below, a dot at each channel's largest.

    mean (T,): the prior, which is all that an average reads; channels (d, T): one row per channel, drawn in the order
    of the token that each reads most.
    """
    rows = [size for _, _, channels in heads for size in (1.5, len(channels))]
    longest = max(map(len, (title, *(name for name, _, _ in heads))))  # which fits above few tokens, too
    size = (max(0.32 * len(tokens) + 1.9, 0.08 * longest + 0.6), 0.16 * sum(rows) + 0.5 * len(heads) + 1.3)
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
