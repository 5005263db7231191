"""Pictures of a benchmark: cost over context length."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fem.experiments.bench.cases import Case
from fem.experiments.bench.mixers import Size, colour_of, shown
from fem.experiments.bench.tables import TITLES, Results
from fem.plots import Panel, learning_curves

PANELS = {
    "decode": (("milliseconds a token", "token_s", 1e3, False), ("MiB of state", "state_bytes", 2**-20, False)),
    "context": (
        ("forward, microseconds a token", "forward_s", 1e6, True),
        ("train step, microseconds a token", "train_s", 1e6, True),
        ("train step, extra MiB", "train_extra_bytes", 2**-20, False),
    ),
}


def redraw(results: Mapping, recipe: Mapping, folder: Path) -> None:
    """A picture for each part in which the context grows, from what results.json holds."""
    cases = [(_case(record), record["results"]) for record in results["bench"]]
    for part in PANELS:
        if found := [pair for pair in cases if pair[0].part == part]:
            curves(folder / f"{part}.png", part, found)


def _case(record: Mapping) -> Case:
    mixers = record.get("mixers") or record["contenders"]  # the name in results of version 0.1
    return Case(record["part"], Size(**record["size"]), record["dtype"], tuple(mixers), record["layers"])


def curves(path: Path, part: str, results: Results) -> None:
    """One panel per cost, one line per mixer, both axes logarithmic."""
    names = list(dict.fromkeys(name for _, found in results for name in found))
    panels = []
    for label, field, scale, per_token in PANELS[part]:
        series = {}
        for name in names:
            points = [
                (case.size.time, scale * found[name][field] / (case.size.time * case.size.batch if per_token else 1))
                for case, found in results
                if found.get(name, {}).get(field)
            ]
            if points:
                series[shown(name)] = [tuple(zip(*points))]
        panels.append(Panel(label, "context (tokens)", series, logarithmic=True))
    learning_curves(path, TITLES[part], panels, {shown(name): colour_of(name) for name in names})
