"""The report of a sweep: every score of every mixer, as numbers and as a page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean

from fem.experiments.common.names import KEY
from fem.experiments.common.run import provenance
from fem.experiments.common.tables import markdown_table, write_page
from fem.experiments.mad.settings import PROFILES, Profile
from fem.experiments.mad.table import (
    COLUMNS,
    SCORES,
    Scores,
    average,
    by_row,
    level_of,
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


def write_report(folder: Path, records: Sequence[dict], profile: Profile, command: str) -> None:
    """The tables and plots of a sweep as a page, the benchmark's own score first; before it the steps, where trainings
    end when enough is right."""
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
