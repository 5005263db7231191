"""`fem regimes`: where the free energy helps, and where it does not; its tables, picture and page."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean

import torch

from fem.provenance import provenance
from fem.tables import markdown_table
from fem_research.common.grid import Grid, Tuned, publish
from fem_research.common.mixers import POOLS, UNTYPED, mixer_config, taken_apart
from fem_research.common.names import KEY, display
from fem_research.common.paired import by_seed, in_words, paired, shown, spread
from fem_research.common.sweep import sweep
from fem_research.regimes.settings import RegimesRecipe
from fem_research.regimes.training import build, constants, train
from fem_research.runs.run import RUNS, check_output, command_line, progress
from fem_research.runs.tables import write_page

Found = dict[str, dict[str, list[dict]]]
QUESTION = "Does the free energy help?"
STARTS = re.compile(r"/(b[\d.]+|l-?[\d.]+)")


def tests(records: list[dict]) -> list[float]:
    """The last test score of every seed."""
    return [record["curve"][-1]["test"] for record in records]


def lead(row: str, rows: dict[str, list[dict]]) -> dict | None:
    """The lead of the row, on the same seeds, over plain attention, or where that was not run over the same mixer
    with the paper's starts; None where neither was.
    """
    other = _attention(rows) or STARTS.sub("", row)
    if other not in rows or other == row:
        return None
    return {"row": other} | dict(zip(("mean", "error"), paired(tests(rows[row]), tests(rows[other]))))


def over(row: str, rows: dict[str, list[dict]]) -> str:
    """`lead` as text; empty where there is none."""
    ahead = lead(row, rows)
    return in_words(ahead["mean"], ahead["error"]) if ahead else ""


def compared(rows: dict[str, list[dict]]) -> str:
    """The name of what the rows of a table are compared with."""
    attention = _attention(rows)
    return "the paper's start" if attention is None else display(attention)


def _attention(rows: dict[str, list[dict]]) -> str | None:
    """Attention without any part of FEM: of several numbers of heads and position codes the best on the test."""
    plain = [row for row in rows if row not in UNTYPED and taken_apart(row)[:2] == ("softmax", "")]
    if plain:
        return max(plain, key=lambda row: mean(tests(rows[row])))
    return "pool:attention" if "pool:attention" in rows else None


def overview(tasks: Found) -> list[dict]:
    """A row per mixer, a column per task: mean over seeds."""
    rows = next(iter(tasks.values()))
    return [
        {"mixer": display(row)} | {task: mean(tests(of_task[row])) for task, of_task in tasks.items()} for row in rows
    ]


def table(rows: dict[str, list[dict]]) -> list[dict]:
    """One task: mean and spread over seeds, and the difference from what a row is compared with, on the same seeds."""
    lines = []
    ahead = {row: over(row, rows) for row in rows}
    for row, records in rows.items():
        scores, job = tests(records), records[0]["job"]
        sizes = (job["training"]["width"], job["training"]["heads"])
        line = {"mixer": display(row), "values": None if row in UNTYPED else mixer_config(row, *sizes).fem_dim}
        line |= {"score": mean(scores), "sd": spread(scores)}
        line |= {f"over {compared(rows)}": ahead[row]} if any(ahead.values()) else {}
        line |= {"by seed": by_seed(scores), "learning rate": f"{job['learning_rate']:g}"}
        line |= {"parameters": records[0]["parameters"], "seconds": round(mean(r["seconds"] for r in records), 1)}
        lines.append(line)
    return sorted(lines, key=lambda line: -line["score"])


def verdict(task: str, rows: dict[str, list[dict]]) -> str:
    """One sentence: which row wins, by how much over what it is compared with, and against the next one."""
    ranked = sorted(rows, key=lambda row: -mean(tests(rows[row])))
    best, second = ranked[0], ranked[1] if len(ranked) > 1 else None
    said = f"{task}: {display(best)} ({mean(tests(rows[best])):.3f})"
    if ahead := over(best, rows):
        said += f", {ahead} over {compared(rows)}"
    if second is not None:
        said += f"; next {display(second)}, {shown(tests(rows[best]), tests(rows[second]))} behind"
    return said + "."


def summary(tasks: Mapping[str, Tuned]) -> dict:
    """Every score of every row, by task: by seed, by learning rate, and paired with what it is compared with."""
    scores: dict = {}
    for task, (tuning, rows) in tasks.items():
        for row, records in rows.items():
            rates = {f"{rate:g}": record["curve"][-1]["validation"] for rate, record in tuning[row].items()}
            scores.setdefault(task, {})[row] = {
                "test": tests(records),
                "over": lead(row, rows),
                "learning_rate": records[0]["job"]["learning_rate"],
                "validation_by_rate": rates,
                "beta": [{k: v for k, v in r["curve"][-1].items() if k.startswith("beta")} for r in records],
                "parameters": records[0]["parameters"],
                "seconds": [round(record["seconds"], 1) for record in records],
            }
    return scores


def title(recipe: RegimesRecipe) -> str:
    if all(row in POOLS for row in recipe.rows):
        return f"Pooling a set: {', '.join(recipe.task_names)}"
    if all(STARTS.sub("", row) in recipe.rows for row in recipe.rows) and any(map(STARTS.search, recipe.rows)):
        return f"{QUESTION} Starts of beta and lambda"
    usual = type(recipe)()
    about = ["more heads"] if any(re.search(r"/(h\d|norope)", row) for row in recipe.rows) else []
    about += ["values as wide as the model"] if any("/wide" in row for row in recipe.rows) else []
    about += [] if set(usual.task_names) <= set(recipe.task_names) else [", ".join(recipe.task_names)]
    about += [_counted(recipe.blocks, "block")] if recipe.blocks != usual.blocks else []
    about += [_counted(recipe.heads, "head")] if recipe.heads != usual.heads else []
    about = "; ".join(about)
    return f"{QUESTION} {about[:1].upper()}{about[1:]}".rstrip()


def _counted(number: int, thing: str) -> str:
    return f"{number} {thing}{'s' * (number > 1)}"


def write_report(folder: Path, tasks: Found, floors: dict[str, float], recipe: RegimesRecipe, command: str) -> None:
    parts = []
    for task, rows in tasks.items():
        about = recipe.known_tasks[task]
        parts += [
            f"## {task}: {about.about}",
            f"Asks for {about.asks_for}. Score: {about.measure} on {recipe.training.test_examples} new examples after "
            f"the last step; an answer that never looks: {floors[task]:.3f}. values: their width over all heads.",
            markdown_table(table(rows), {"score": max}),
        ]
    write_page(
        folder,
        title(recipe),
        f"{_counted(recipe.blocks, 'block')} of [mixer, SwiGLU], width {recipe.width}, "
        f"{_counted(recipe.heads, 'head')}, {recipe.steps} steps of {recipe.batch} examples, AdamW with cosine decay, "
        "no weight decay, starts drawn by the same rule, the same examples for every row of a seed; equal parameters "
        "(a mixer with more gets a narrower SwiGLU). Every row takes the learning rate that is best on the first "
        f"seed's validation, and is tested on other examples. {KEY} /r4: gates of rank 4, whose width goes to the "
        "values; /b8: beta starts at 8 instead of 1.95; /l6: lambda's bias at 6; /wide, /double, /thirds: values 1, 2 "
        "and 2/3 as wide as the model; /conv: behind a short convolution; /h16: 16 heads; /norope: no position code. "
        "cummax: the running maximum between two linear maps; gru: torch's GRU. ±: standard error of the "
        "difference, seed by seed.",
        markdown_table(overview(tasks), dict.fromkeys(tasks, max)),
        "\n".join(f"* {verdict(task, rows)}" for task, rows in tasks.items()),
        "![scores by task and mixer](scores.png)",
        *parts,
        provenance(command),
    )


def run(recipe: RegimesRecipe, output: Path, workers: int | None = None) -> dict:
    """Run the jobs without a record in `output`/runs, write table, page and plots; returns what results.json holds."""
    check_output(output, "regimes", recipe)
    floors = constants(recipe.training, {task: recipe.known_tasks[task] for task in recipe.task_names})
    with torch.device("meta"):  # what cannot be built is refused before anything is written
        for task, row in product(recipe.task_names, recipe.rows):
            build(recipe.known_tasks[task], row, recipe.training)
    train_all = partial(sweep, train=partial(train, tasks=recipe.known_tasks), workers=workers)
    seeds = range(recipe.seed, recipe.seed + recipe.seeds)
    tasks = {}
    with progress() as bars:
        for task in recipe.task_names:
            grid = Grid(output / RUNS, train_all, bars, f"regimes: {task}", told)
            tasks[task] = grid.tuned(recipe.rows, recipe.rates, seeds, partial(recipe.job, task), error)
    found = {task: of_task.chosen for task, of_task in tasks.items()}
    return publish(
        output,
        "regimes",
        recipe,
        (record for rows in found.values() for records in rows.values() for record in records),
        ("task", "mixer", "seed"),
        tables={"table": overview(found)},
        page=lambda folder: write_report(
            folder, found, floors, recipe, command_line("regimes", recipe, RegimesRecipe())
        ),
        results={"regimes": summary(tasks), "constants": floors},
        shown=("Scores by task, mean over seeds", overview(found)),
    )


def told(record: dict) -> str:
    job = record["job"]
    rate = f"rate {job['learning_rate']:g}"
    return f": {display(job['mixer'])}, {rate}, seed {job['seed']}: {record['curve'][-1]['validation']:.3f}"


def error(record: dict) -> float:
    """The error by which learning rates are chosen: minus the last score on the validation."""
    return -record["curve"][-1]["validation"]
