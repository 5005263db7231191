"""Pictures of a benchmark: cost over context."""

from __future__ import annotations

from pathlib import Path

from fem.experiments.bench.mixers import BASELINE
from fem.experiments.bench.tables import Results
from fem.plots import Panel, learning_curves

COLOUR_OF = {BASELINE: "softmax", "FEM-SM": "fem"}
PANELS = {
    "decode": (("milliseconds a token", "token_s", 1e3, False), ("MiB of state", "state_bytes", 2**-20, False)),
    "context": (
        ("forward, microseconds a token", "forward_s", 1e6, True),
        ("train step, microseconds a token", "train_s", 1e6, True),
        ("train step, extra MiB", "train_extra_bytes", 2**-20, False),
    ),
}


def draw(path: Path, part: str, title: str, results: Results) -> None:
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
                series[COLOUR_OF.get(name, name)] = tuple(zip(*points))
        panels.append(Panel(label, "context (tokens)", series, logarithmic=True))
    learning_curves(path, title, panels)
