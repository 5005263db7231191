"""Pictures of the results: every seed's error, and forecasts of one test window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from fem.experiments.common.names import colour, display
from fem.plots import dots, picture

NAMES = {
    "itransformer": "iTransformer",
    "patchtst": "PatchTST",
    "dlinear": "DLinear",
    "femforecaster": "FEMForecaster",
    "none": "no mixer",
}
OWN_COLOURS = {"itransformer": "#64748b", "patchtst": "#857c74", "dlinear": "#a08c74", "none": "#111827"}


def name_of(model: str) -> str:
    return NAMES.get(model) or display(model)


def colour_of(model: str) -> str:
    return OWN_COLOURS.get(model) or colour("fem" if model == "femforecaster" else model)


def redraw(results: Mapping, recipe: Mapping, folder: Path) -> None:
    """errors.png, from what results.json holds: the test error of every model, a dot per seed."""
    panels: dict[str, dict] = {}
    for row in results["forecast"]:
        panels.setdefault(f"{row['data']}, {row['horizon']}", {})[name_of(row["model"])] = row["mses"]
    colours = {name_of(row["model"]): colour_of(row["model"]) for row in results["forecast"]}
    dots(folder / "errors.png", "Test MSE by data and horizon: a dot per seed", panels, colours)


def forecasts(path: Path, records: Sequence[dict]) -> None:
    """The last channel of the middle test window, and its forecast by every model's first seed. A row of panels per
    series, a column per horizon.
    """
    first: dict[tuple, dict] = {}
    for record in records:
        first.setdefault((record["data"], record["horizon"], record["model"]), record)
    data, horizons = (list(dict.fromkeys(record[name] for record in records)) for name in ("data", "horizon"))
    title = "Last channel in the middle of the test rows, scaled"
    with picture(path, title, 4.6 * len(horizons) + 1.6, 3.0 * len(data) + 0.3) as figure:
        panels = figure.subplots(len(data), len(horizons), squeeze=False)
        for record in first.values():
            axes = panels[data.index(record["data"])][horizons.index(record["horizon"])]
            shown = record["example"]
            past, future = range(-len(shown["history"]), 0), range(record["horizon"])
            if not axes.lines:
                axes.plot(
                    [*past, *future], shown["history"] + shown["future"], color="black", linewidth=1, label="truth"
                )
            look = {"color": colour_of(record["model"]), "linewidth": 1.4}
            axes.plot(future, shown["forecast"], **look, label=name_of(record["model"]))
            axes.set_xlabel("rows from now")
            axes.set_title(f"{record['data']}, horizon {record['horizon']}")
        labelled = {label: line for axes in panels.flat for line, label in zip(*axes.get_legend_handles_labels())}
        figure.legend(labelled.values(), labelled.keys(), loc="outside right upper")
