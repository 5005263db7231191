"""The report of a sweep: every score of every mixer, as numbers, pictures and a page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean

from fem.plots import dots, picture
from fem.runs.run import provenance
from fem.runs.tables import markdown_table, write_page
from fem_research.common.names import KEY, colour, display
from fem_research.mad.settings import PROFILES, Profile
from fem_research.mad.table import (
    COLUMNS,
    SCORES,
    Curve,
    Scores,
    average,
    baseline_runs,
    by_row,
    level_of,
    prior_alone,
    readable,
    scored,
    scores_of,
    steps_of,
    steps_table,
    table1,
    task_scores,
)


def summary(records: Sequence[dict]) -> dict:
    """Every score of every mixer in every task, by initialisation: a figure per seed, and their mean."""
    found: dict = {}
    level, tasks = level_of(records), dict.fromkeys(record["job"]["setting"]["task"] for record in records)
    for (mixer, initialisation), own in by_row(records).items():
        found.setdefault(initialisation, {})[mixer] = {
            "parameters": own[0]["parameters"],
            "seconds": round(sum(record["seconds"] for record in own), 1),
            **{score: _by_task(own, score) for score in scores_of(records)},
            "steps": {"to": level, "by_seed": {task: steps_of(own, task, level) for task in tasks}},
        }
    return found


def _by_task(records: Sequence[dict], score: str) -> dict[str, dict]:
    tasks = task_scores(records, score)
    overall = average(tasks)
    return {
        task: {"mean": mean(seeds), "seeds": seeds}
        for task, seeds in (tasks | ({"average": overall} if overall else {})).items()
    }


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


def write_report(folder: Path, records: Sequence[dict], profile: Profile, command: str) -> None:
    """curves.png, and the tables and plots of a sweep as a page, the benchmark's own score first; before it the steps,
    where trainings end when enough is right."""
    curves(folder / "curves.png", records)
    paper = profile == PROFILES["paper"]
    scores = score_tables({score: scored(records, score) for score in scores_of(records)}, profile.score, paper)
    steps = (
        f"## Steps to {100 * level_of(records):g} %",
        'In the first setting of each task, a figure per seed, "-" where it was not reached.',
        markdown_table(steps_table(records)),
    )
    training = ", ".join(f"{name} {value}" for name, value in asdict(profile.training).items())
    rates, decays = (", ".join(map("{:g}".format, given)) for given in (profile.learning_rates, profile.weight_decays))
    write_page(
        folder,
        f"MAD: {profile.title}",
        "Percent of the scored tokens of new sequences, mean over seeds; sd: of the average, over seeds; over its "
        "prior: the average's difference from the same prior without any part of FEM, seed by seed, ± its standard "
        "error. In every task all models have the same number of parameters (a mixer that has more gets a narrower "
        f"SwiGLU), and all linear maps start by the same rule. {KEY} The paper names the parts that are missing: its "
        "FEM-SM(-G,T) is attention+CL here.",
        profile.about,
        *(scores + steps if math.isinf(profile.training.enough) else steps + scores),
        "![accuracy over steps](curves.png)",
        "![scores by mixer and task](scores.png)",
        provenance(command),
        f"Learning rates {rates}, weight decays {decays}, constant after the warm-up; {training}. The lowest "
        "perplexity is that of the test set, as in MAD.",
    )


def score_tables(found: dict[str, Scores], first: str, paper: bool) -> tuple[str, ...]:
    """A heading and a table per score; with `paper`, Table 1 in full and its figures in brackets under the first."""
    parts: list[str] = []
    for score in dict.fromkeys([first, *found]):
        title, table = SCORES[score], table1(found[score])
        if not paper or score != first:
            table = [row for row in table if row["seeds"]]
        parts += [f"## {title[0].upper()}{title[1:]}", markdown_table(readable(table, paper), BEST)]
    return tuple(parts)


BEST = dict.fromkeys([*COLUMNS.values(), "Avg"], max)
