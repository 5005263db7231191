"""Pictures of the runs: forecasts of one test window, and validation errors. A row per series, a column per horizon."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fem.plots import COLOURS, OTHERS, STYLE

OWN_LOOKS = {"softmax+CLTG": (COLOURS["fem"], "-"), "softmax": (COLOURS["softmax"], "-")}
OTHER_LOOKS = [(colour, line) for line in ("-", "--", ":") for colour in OTHERS]

Draw = Callable[[Axes, dict, dict], None]


def forecasts(path: Path, records: Sequence[dict], names: dict[str, str]) -> None:
    """The truth in the last channel of the middle test window, and every model's forecast of it by its first seed."""
    first: dict[tuple, dict] = {}
    for record in records:
        first.setdefault((record["data"], record["horizon"], record["model"]), record)

    def draw(axes: Axes, record: dict, look: dict) -> None:
        shown = record["example"]
        past, future = range(-len(shown["history"]), 0), range(record["horizon"])
        if not axes.lines:
            axes.plot([*past, *future], shown["history"] + shown["future"], color="#111827", linewidth=1, label="truth")
        axes.plot(future, shown["forecast"], **look, label=names.get(record["model"], record["model"]))
        axes.set_xlabel("rows from now")

    _grid(path, "Last channel in the middle of the test rows, scaled", list(first.values()), draw)


def curves(path: Path, records: Sequence[dict], names: dict[str, str]) -> None:
    """Validation error over the epochs of the backbone, a line per seed."""

    def draw(axes: Axes, record: dict, look: dict) -> None:
        name = names.get(record["model"], record["model"])
        seen = any(line.get_label() == name for line in axes.lines)
        points = record["curve"]
        epochs, errors = ([point[key] for point in points] for key in ("epoch", "validation_mse"))
        axes.plot(epochs, errors, **look, marker=".", label="_" if seen else name)
        axes.set_xlabel("epoch")
        axes.xaxis.get_major_locator().set_params(integer=True)

    _grid(path, "Validation MSE", records, draw)


def _grid(path: Path, title: str, records: Sequence[dict], draw: Draw) -> None:
    data, horizons = (list(dict.fromkeys(record[name] for record in records)) for name in ("data", "horizon"))
    others = iter(OTHER_LOOKS * len(records))
    models = dict.fromkeys(record["model"] for record in records)
    looks = {model: OWN_LOOKS.get(model) or next(others) for model in models}
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(4.6 * len(horizons) + 1.6, 3.0 * len(data) + 0.3), layout="constrained")
        figure.suptitle(title, x=0.01, ha="left", fontsize=10)
        panels = figure.subplots(len(data), len(horizons), squeeze=False)
        for record in records:
            axes = panels[data.index(record["data"])][horizons.index(record["horizon"])]
            colour, line = looks[record["model"]]
            draw(axes, record, {"color": colour, "linestyle": line, "linewidth": 1.4})
            axes.set_title(f"{record['data']}, horizon {record['horizon']}")
        labelled = {label: line for axes in panels.flat for line, label in zip(*axes.get_legend_handles_labels())}
        figure.legend(labelled.values(), labelled.keys(), loc="outside right upper")
        figure.savefig(path)
