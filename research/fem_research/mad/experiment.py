"""`fem mad`: a sweep over tasks, mixers and seeds that ends in Table 1; scores, pictures and a page."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import mean

import pandas as pd

from fem.plots import picture
from fem.provenance import note, provenance
from fem.tables import markdown_table
from fem_research.common.grid import Grid, publish
from fem_research.common.mixers import OTHERS, known
from fem_research.common.names import KEY, colour, display, sizes
from fem_research.common.paired import shown, spread
from fem_research.common.sweep import sweep
from fem_research.mad.settings import PROFILES, MADRecipe, Profile
from fem_research.mad.training import Point, train
from fem_research.runs.run import RUNS, check_output, command_line, progress
from fem_research.runs.tables import write_page

COLUMNS = {
    "compression": "Compress",
    "fuzzy-in-context-recall": "Fuzzy",
    "in-context-recall": "In-Ctx",
    "memorization": "Memorize",
    "noisy-in-context-recall": "Noisy",
    "selective-copying": "Copy",
}
BEST = dict.fromkeys([*COLUMNS.values(), "Avg"], max)  # of every column of the tables
PAPER: tuple[tuple[str, tuple[float, ...]], ...] = (  # Table 1
    ("Hyena", (44.8, 14.4, 99.0, 89.4, 98.6, 93.0, 73.2)),
    ("fla:DeltaNet", (42.2, 35.7, 99.9, 52.8, 99.9, 99.9, 71.7)),
    ("linear", (33.1, 8.2, 91.0, 74.9, 75.6, 93.1, 62.6)),
    ("fla:Mamba2", (43.6, 21.1, 96.4, 86.9, 96.7, 93.3, 73.0)),
    ("fla:GatedDeltaNet", (45.0, 29.8, 99.9, 80.2, 99.9, 94.3, 74.9)),
    ("DiffTrans", (42.9, 39.0, 99.9, 83.7, 97.1, 95.8, 76.4)),
    ("softmax", (44.3, 24.5, 99.9, 85.7, 98.5, 95.1, 74.7)),
    ("softmax+C", (45.0, 31.4, 99.9, 85.5, 99.9, 96.3, 76.3)),
    ("softmax+CL", (50.3, 39.0, 99.9, 85.4, 99.9, 98.0, 78.8)),
    ("softmax+CLT", (52.3, 39.1, 99.9, 85.8, 99.9, 99.4, 79.4)),
    ("softmax+CLTG", (53.1, 43.1, 99.9, 85.9, 99.9, 99.3, 80.2)),
    ("softmax+L", (49.5, 26.3, 99.9, 85.7, 97.5, 97.5, 76.1)),
    ("softmax+LT", (50.7, 32.8, 99.9, 85.7, 98.0, 97.6, 77.5)),
    ("softmax+LTG", (51.2, 35.4, 99.9, 85.9, 98.5, 99.0, 78.3)),
    ("gla", (40.2, 8.5, 91.3, 81.3, 86.8, 76.8, 64.2)),
    ("gla+C", (47.1, 9.4, 91.7, 83.4, 92.5, 88.5, 68.8)),
    ("gla+CL", (51.2, 12.4, 92.2, 85.1, 92.4, 89.2, 70.4)),
    ("gla+CLT", (51.9, 13.2, 97.1, 86.1, 93.5, 91.4, 72.2)),
    ("gla+CLTG", (53.0, 19.1, 99.9, 86.3, 99.9, 99.0, 74.9)),
    ("mamba/paper", (52.7, 6.7, 90.4, 89.5, 90.1, 86.3, 69.3)),
    ("mamba+CLTG-norm/paper", (50.5, 12.8, 93.4, 88.9, 86.3, 92.2, 70.7)),
    ("mamba+CLTG/paper", (51.1, 16.8, 90.7, 89.7, 92.7, 97.0, 73.0)),
    ("aft/paper", (50.5, 9.15, 63.0, 31.1, 69.2, 90.1, 52.2)),
    ("aft+CLTG/paper", (55.5, 9.78, 90.3, 80.1, 90.2, 93.4, 69.9)),
)
TABLE1 = tuple((known(name), figures) for name, figures in PAPER)

Curve = Sequence[Point]


def best(curve: Curve) -> Point:
    """The evaluation of lowest perplexity, whose score MAD reports: a choice made on the test set."""
    return min(curve, key=lambda point: point["test_loss"] if math.isfinite(point["test_loss"]) else math.inf)


SCORES = {
    "mad": "accuracy at the test of lowest perplexity",
    "mad_macro": "accuracy at the test of lowest perplexity, mean over classes",
    "mad_own": "MAD's own accuracy, by batches, classes that are only predicted counted, at that test",
    "final": "accuracy after the last step",
    "final_macro": "accuracy after the last step, mean over classes",
    "mean": "accuracy, mean over the evenly spaced tests",
}
MEASURES: dict[str, Callable[[Curve], float]] = {
    "mad": lambda curve: best(curve)["micro"],
    "mad_macro": lambda curve: best(curve)["macro"],
    "mad_own": lambda curve: best(curve)["own"],
    "final": lambda curve: curve[-1]["micro"],
    "final_macro": lambda curve: curve[-1]["macro"],
    "mean": lambda curve: mean(point["micro"] for point in curve),
}


def scores_of(records: Iterable[dict]) -> dict[str, str]:
    """The scores that compare these runs, and their titles: the mean over tests does not, where runs end early."""
    records = list(records)
    early = any(record["job"]["training"].get("enough") for record in records)
    known = all("own" in record["curve"][0] for record in records)
    left = {"mean": early, "mad_own": not known}  # earlier runs did not keep the latter
    return {score: title for score, title in SCORES.items() if not left.get(score)}


def steps_to(level: float, curve: Curve) -> int | None:
    """The first evaluated step at which the accuracy reaches `level`."""
    return next((point["step"] for point in curve if point["micro"] >= level), None)


Row = tuple[str, str]  # a mixer and an initialisation


def by_row(records: Iterable[dict]) -> dict[Row, list[dict]]:
    rows: dict[Row, list[dict]] = {}
    for record in records:
        rows.setdefault((record["job"]["mixer"], record["job"]["initialisation"]), []).append(record)
    return rows


def task_scores(records: Iterable[dict], score: str) -> dict[str, list[float]]:
    """One mixer's score in every task, a figure per seed: the best of the grid in every setting, then their mean."""
    rows = [
        (job["setting"]["task"], job["seed"], str(job["setting"]), MEASURES[score](record["curve"]))
        for record in records
        for job in [record["job"]]
    ]
    grids = pd.DataFrame(rows, columns=["task", "seed", "setting", "score"]).groupby(["task", "seed", "setting"])
    by_seed = grids.score.max().groupby(["task", "seed"]).mean()
    return {task: by_seed[task].tolist() for task in dict.fromkeys(row[0] for row in rows)}


def average(tasks: dict[str, list[float]]) -> list[float] | None:
    """Each seed's mean over the six tasks; None where a task was not run."""
    return [mean(seed) for seed in zip(*(tasks[task] for task in COLUMNS))] if tasks.keys() >= COLUMNS.keys() else None


Scores = dict[Row, dict[str, list[float]]]  # by mixer and initialisation: a figure per seed of every task


def scored(records: Iterable[dict], score: str) -> Scores:
    return {row: task_scores(of_row, score) for row, of_row in by_row(records).items()}


def table1(scores: Scores) -> list[dict]:
    """Table 1 in percent: our mean over seeds and the paper's figure by column; other mixers of ours come last."""
    initialisations = sorted({initialisation for _, initialisation in scores})
    published = {name for name, _ in TABLE1}
    others = dict.fromkeys(mixer for mixer, _ in scores if mixer not in published)
    rows = [*TABLE1, *((mixer, (None,) * 7) for mixer in others)]
    table = []
    for mixer, figures in rows:
        starts = [start for start in initialisations if (mixer, start) in scores]
        for start in starts or [""]:
            name = _label(mixer, start, bool(start) and len(initialisations) > 1)
            of_prior = average(scores.get((prior_alone(mixer), start), {})) if start else None
            table.append(_row(name, figures, scores.get((mixer, start), {}), of_prior))
    return table


def prior_alone(mixer: str) -> str:
    """The mixer's prior without any part of FEM; a published mixer itself."""
    if mixer in OTHERS or mixer.startswith("fla:"):
        return mixer
    return known(re.split(r"[+/]|-norm", mixer)[0] + ("/paper" if "paper" in mixer.split("/") else ""))


def _row(label: str, figures: Sequence[float | None], tasks: dict[str, list[float]], prior: list[float] | None) -> dict:
    row: dict = {"model": label}
    overall = average(tasks)
    columns = [*((title, tasks.get(task)) for task, title in COLUMNS.items()), ("Avg", overall)]
    for (title, ours), paper in zip(columns, figures):
        row |= {title: 100 * mean(ours) if ours else None, f"{title}, paper": paper}
    row["Avg, sd over seeds"] = spread([100 * score for score in overall]) if overall else None
    comparable = overall and prior and len(overall) == len(prior) and overall != prior
    row["Avg over its prior"] = shown(overall, prior, 100, 1) if comparable else None
    row["seeds"] = max(map(len, tasks.values()), default=None)
    return row


def readable(table: Iterable[dict], paper: bool) -> list[dict]:
    """`table1` for a page: one column per task, one decimal; with `paper`, the paper's in brackets after it."""
    beside = lambda row, title: f"({_decimal(row[f'{title}, paper'])})" if paper else ""  # noqa: E731
    return [
        {"model": row["model"]}
        | {title: f"{_decimal(row[title])} {beside(row, title)}".removesuffix("()").strip() for title in BEST}
        | {"sd": _decimal(row["Avg, sd over seeds"]), "over its prior": row["Avg over its prior"] or ""}
        | {"seeds": row["seeds"]}
        for row in table
    ]


def _decimal(figure: float | None) -> str:
    return "" if figure is None else f"{figure:.1f}"


def baseline_runs(records: Iterable[dict], task: str) -> list[dict]:
    """One mixer's runs in the task's first setting, one per seed: the first to have enough right, or the best."""
    of_task = [record for record in records if record["job"]["setting"]["task"] == task]
    first = [record for record in of_task if record["job"]["setting"] == of_task[0]["job"]["setting"]]
    first.sort(key=lambda record: (record["job"]["seed"], *_slowness(record)))
    return list({record["job"]["seed"]: record for record in reversed(first)}.values())[::-1]


def _slowness(record: dict) -> tuple[int | float, float]:
    enough = record["job"]["training"].get("enough") or math.inf
    return steps_to(enough, record["curve"]) or math.inf, -MEASURES["mean"](record["curve"])


def level_of(records: Sequence[dict]) -> float:
    """The accuracy that `steps_table` counts steps to: the one at which runs end, else 90 %."""
    return records[0]["job"]["training"].get("enough") or 0.9


def steps_of(records: Sequence[dict], task: str, level: float) -> list[int | None]:
    """`steps_to` of one mixer's runs in the task's first setting, a figure per seed."""
    return [steps_to(level, record["curve"]) for record in baseline_runs(records, task)]


def steps_table(records: Sequence[dict]) -> list[dict]:
    """Steps until the accuracy in a task's first setting is `level_of`, a figure per seed, "-" where it never is."""
    level = level_of(records)
    words = lambda of_row, task: " ".join(str(step or "-") for step in steps_of(of_row, task, level)) or None  # noqa: E731
    return [
        {"mixer": display(mixer), "start": start} | {title: words(of_row, task) for task, title in COLUMNS.items()}
        for (mixer, start), of_row in by_row(records).items()
    ]


def summary(records: Sequence[dict]) -> dict:
    """Every score of every mixer in every task, by initialisation: a figure per seed, and their mean."""
    by_start: dict = {}
    level, tasks = level_of(records), dict.fromkeys(record["job"]["setting"]["task"] for record in records)
    for (mixer, initialisation), of_row in by_row(records).items():
        by_start.setdefault(initialisation, {})[mixer] = {
            "sizes": {record["job"]["setting"]["task"]: record["parameters"] for record in reversed(of_row)},
            "seconds": round(sum(record["seconds"] for record in of_row), 1),
            **{score: _by_task(of_row, score) for score in scores_of(records)},
            "steps": {"to": level, "by_seed": {task: steps_of(of_row, task, level) for task in tasks}},
        }
    return by_start


def _by_task(records: Sequence[dict], score: str) -> dict[str, dict]:
    tasks = task_scores(records, score)
    if overall := average(tasks):
        tasks["average"] = overall
    return {task: {"mean": mean(seeds), "seeds": seeds} for task, seeds in tasks.items()}


def curves(path: Path, records: Sequence[dict]) -> None:
    """Test accuracy over steps in each task's first setting, mean over seeds; a run that ended early keeps its last."""
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
                for (mixer, initialisation), of_row in rows.items():
                    runs = baseline_runs(of_row, task)
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
    """The page, the benchmark's own score first; before it the steps, where trainings end when enough is right."""
    curves(folder / "curves.png", records)
    paper = profile.title == PROFILES["paper"].title
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
        f"error. In every task all models have {sizes(profile.training.mlp, 'SwiGLUs')}, "
        f"and all linear maps start by the same rule. {KEY} The paper names the parts that are missing: its "
        "FEM-SM(-G,T) is attention+CL here.",
        profile.about,
        *(steps + scores if profile.score == "mad" and profile.training.enough else scores + steps),
        "![accuracy over steps](curves.png)",
        "![scores by mixer and task](scores.png)",
        provenance(command),
        f"Learning rates {rates}, weight decays {decays}, constant after the warm-up; {training}. The lowest "
        "perplexity is that of the test set, as in MAD.",
    )


def score_tables(scores: dict[str, Scores], first: str, paper: bool) -> tuple[str, ...]:
    """A heading and a table per score; with `paper`, Table 1 in full and its figures in brackets under the first."""
    parts: list[str] = []
    for score in dict.fromkeys([first, *scores]):
        title, table = SCORES[score], table1(scores[score])
        if not paper or score != first:
            table = [row for row in table if row["seeds"]]
        parts += [f"## {title[0].upper()}{title[1:]}", markdown_table(readable(table, paper), BEST)]
    return tuple(parts)


def run(recipe: MADRecipe, output: Path, workers: int | None = None) -> dict:
    """Run the jobs that have no record in `output`/runs, write table and plots; returns what results.json holds."""
    check_output(output, "mad", recipe)
    note(f"{recipe.cost()}.")
    train_all = partial(sweep, train=train, workers=workers)
    with progress() as bars:
        records = Grid(output / RUNS, train_all, bars, "MAD", told).records(recipe.jobs())
    profile = recipe.fixed
    table = table1(scored(records, profile.score))
    return publish(
        output,
        "mad",
        recipe,
        records,
        ("task", "mixer", "initialisation", "learning_rate", "seed"),
        tables={"table": table},
        page=lambda folder: write_report(folder, records, profile, command_line("mad", recipe, MADRecipe())),
        results={"mad": summary(records)},
        shown=(
            f"MAD, {recipe.profile} profile: {SCORES[profile.score]}, percent",
            readable([row for row in table if row["seeds"]], False),
        ),
    )


def told(record: dict) -> str:
    job, micro = record["job"], record["curve"][-1]["micro"]
    return f": {display(job['mixer'])}, {job['setting']['task']}, seed {job['seed']}: {micro:.1%}"
