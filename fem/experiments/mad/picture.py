"""Pictures of a sweep: every seed's score, and learning curves by prior and task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean

from fem.experiments.common.names import colour, display
from fem.experiments.mad.settings import PROFILES
from fem.experiments.mad.table import COLUMNS, SCORES, Curve, baseline_runs, by_row, prior_alone
from fem.plots import dots, picture


def redraw(results: Mapping, recipe: Mapping, folder: Path) -> None:
    """scores.png, from what results.json holds: a dot for each seed of each mixer in each task."""
    found, score = results["mad"], PROFILES[recipe["profile"]].score
    panels: dict[str, dict] = {}
    colours = {}
    for initialisation, mixers in found.items():
        for mixer, scores in mixers.items():
            name = _label(mixer, initialisation, len(found) > 1)
            colours[name] = colour(mixer)
            for task, title in COLUMNS.items():
                if task in scores[score]:
                    panels.setdefault(title, {})[name] = scores[score][task]["seeds"]
    ordered = {title: panels[title] for title in COLUMNS.values() if title in panels}
    dots(folder / "scores.png", f"{SCORES[score].capitalize()}: a dot per seed", ordered, colours)


def curves(path: Path, records: Sequence[dict]) -> None:
    """Test accuracy over steps in the first setting of each task, mean over seeds: a row of panels for each prior.

    A run that ended early, at a dot, counts with its last accuracy from there on.
    """
    rows = by_row(records)
    several = len({initialisation for _, initialisation in rows}) > 1
    run = {record["job"]["setting"]["task"] for record in records}
    tasks = [task for task in COLUMNS if task in run]
    priors = list(dict.fromkeys(prior_alone(mixer) for mixer, _ in rows))
    title = "Accuracy on new sequences over steps: mean over seeds"
    with picture(path, title, 2.5 * len(tasks) + 2.2, 2.3 * len(priors) + 0.5) as figure:
        parts = figure.subfigures(len(priors), 1, squeeze=False)[:, 0]
        for part, prior in zip(parts, priors):
            key = {}
            for task, axes in zip(tasks, part.subplots(1, len(tasks), squeeze=False, sharey=True)[0]):
                for (mixer, initialisation), own in rows.items():
                    runs = baseline_runs(own, task)
                    if not runs or prior_alone(mixer) != prior:
                        continue
                    steps, accuracy = mean_curve([record["curve"] for record in runs])
                    dashed = several and initialisation == "torch"
                    look = {"color": colour(mixer), "linestyle": "--" if dashed else "-"}
                    look |= {"marker": "o", "markevery": [-1]} if steps[-1] < runs[0]["job"]["setting"]["steps"] else {}
                    key[_label(mixer, initialisation, several)] = axes.plot(steps, accuracy, linewidth=1.5, **look)[0]
                axes.set(title=COLUMNS[task], xlabel="step", ylim=(0, 1.03))
            part.legend(key.values(), key.keys(), loc="outside right center")


def mean_curve(curves: Sequence[Curve]) -> tuple[list[int], list[float]]:
    """The steps of the longest curve, and the mean accuracy there; a shorter one goes on at its last accuracy."""
    steps = [point["step"] for point in max(curves, key=len)]
    return steps, [mean(curve[min(at, len(curve) - 1)]["micro"] for curve in curves) for at in range(len(steps))]


def _label(mixer: str, initialisation: str, several: bool) -> str:
    return f"{display(mixer)}, {initialisation} start" if several else display(mixer)
