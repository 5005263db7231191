"""`fem natural`: which pooling gives sets and series their natural labels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import mean

import pandas as pd

from fem.provenance import provenance
from fem.tables import markdown_table
from fem_research.common.grid import Grid, publish
from fem_research.common.names import display
from fem_research.common.paired import by_seed, in_words, paired
from fem_research.common.sweep import sweep
from fem_research.natural.settings import SETS, NaturalRecipe
from fem_research.natural.training import bags, digest, train
from fem_research.runs.run import RUNS, check_output, command_line, progress
from fem_research.runs.tables import write_page

REFERENCE = "pool:attention"


def run(recipe: NaturalRecipe, output: Path, workers: int | None = None) -> dict:
    """Run the jobs without a record in `output`/runs, write tables, page and plot; returns what results.json holds."""
    check_output(output, "natural", recipe)
    files = {name: digest(name, recipe.data) for name in recipe.set_names}
    label = {name: bags(name, recipe.data).label.tolist() for name in recipe.set_names}
    for name, labels in label.items():
        if recipe.folds > len(labels):
            raise ValueError(f"folds must be at most {len(labels)}, the bags of {name}, got {recipe.folds}.")
    train_all = partial(sweep, train=partial(train, folder=recipe.data), workers=workers)
    found = {}
    with progress() as bars:
        for name in recipe.set_names:
            grid = Grid(output / RUNS, train_all, bars, f"natural: {name}", told)
            found[name] = grid.records(recipe.jobs(name, files[name]))
    scores = {name: summaries(records, recipe) for name, records in found.items()}
    floors = {name: max(Counter(labels).values()) / len(labels) for name, labels in label.items()}
    overview = [
        {"pool": display(row)} | {name: mean(rows[row]["accuracy"]) for name, rows in scores.items()}
        for row in recipe.rows
    ]
    return publish(
        output,
        "natural",
        recipe,
        chain(*found.values()),
        ("name", "pool", "seed", "fold"),
        tables={"table": overview},
        page=lambda folder: write_report(folder, scores, floors, label, files, overview, recipe),
        results={"natural": scores, "constants": floors, "files": files},
        shown=("Accuracy by set, mean over repeats", overview),
    )


def told(record: dict) -> str:
    job = record["job"]
    return f": {display(job['pool'])}, seed {job['seed']}, fold {job['fold']}: {mean(record['right']):.1%}"


def summaries(records: list[dict], recipe: NaturalRecipe) -> dict[str, dict]:
    """Every pool on a set: its accuracy by repeat, every bag's share of right answers, its lead over attention pooling
    paired by bags, and the rates that folds took."""
    pools: dict[str, dict] = {}
    for row in recipe.rows:
        pool_records = [record for record in records if record["job"]["pool"] == row]
        answers = pd.concat(
            pd.DataFrame({"seed": r["job"]["seed"], "bag": r["bags"], "right": r["right"]}) for r in pool_records
        )
        pools[row] = {
            "accuracy": answers.groupby("seed").right.mean().tolist(),
            "right": answers.groupby("bag").right.mean().tolist(),
            "loss": mean(record["curve"][-1]["loss"] for record in pool_records),
            "rates": dict(sorted(Counter(f"{record['learning_rate']:g}" for record in pool_records).items())),
            "parameters": pool_records[0]["parameters"],
            "seconds": round(sum(record["seconds"] for record in pool_records), 1),
            "over": None,
        }
    for row in pools.keys() - {REFERENCE} if REFERENCE in pools else ():
        lead = paired(pools[row]["right"], pools[REFERENCE]["right"])
        pools[row]["over"] = dict(zip(("mean", "error"), lead))
    return pools


def table(rows: Mapping[str, dict]) -> list[dict]:
    lines = [
        {
            "pool": display(row),
            "accuracy": mean(score["accuracy"]),
            "over attention": "" if score["over"] is None else in_words(**score["over"]),
            "by repeat": by_seed(score["accuracy"]),
            "loss": score["loss"],
            "folds by rate": ", ".join(f"{rate}: {count}" for rate, count in score["rates"].items()),
            **{name: score[name] for name in ("parameters", "seconds")},
        }
        for row, score in rows.items()
    ]
    return sorted(lines, key=lambda line: -line["accuracy"])


def write_report(folder: Path, scores, floors, label, files, overview, recipe: NaturalRecipe) -> None:
    sections = []
    for name, rows in scores.items():
        package, asked = SETS[name]
        hashes = ", ".join(f"{file} ({sha[:16]})" for file, sha in files[name].items())
        sections += [
            f"## {name}: {asked}",
            f"{len(label[name])} bags, {len(set(label[name]))} labels, the most frequent of them {floors[name]:.3f}. "
            f"Of the package {package}: {hashes}.",
            markdown_table(table(rows), {"accuracy": max, "loss": min}),
        ]
    write_page(
        folder,
        "Pooling sets and series with natural labels",
        "A linear map and a SwiGLU encode every element, a pool makes one vector of them, a SwiGLU and a linear map "
        f"answer; width {recipe.width}, heads: {recipe.heads}, equal parameters (a pool with more gets narrower "
        "SwiGLUs). "
        f"{recipe.steps} steps of {recipe.batch} bags, AdamW without weight decay. Cross-validation in {recipe.folds} "
        f"parts, {recipe.seeds} times with other parts and weights. For every part the learning rate of "
        f"{recipe.learning_rates} is chosen by the loss on a quarter of the other bags, and the model is then trained "
        "on all of them. Of points all parts are stretches of the file, where a writer's digits come together. "
        "Features are standardised on the training bags. gated pooling: gated attention (Ilse et al., 2018). ±: "
        "standard error of the paired difference over bags, each with its share of right answers. loss: cross-entropy "
        "in nats. Numbers in brackets: how a file's SHA-256 begins.",
        markdown_table(overview, dict.fromkeys(scores, max)),
        "![accuracy by set and pool](scores.png)",
        *sections,
        provenance(command_line("natural", recipe, NaturalRecipe())),
    )
