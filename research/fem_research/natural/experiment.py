"""`fem natural`: which pooling gives sets and series their natural labels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from statistics import mean

from fem.runs.run import RUNS, check_output, command_line, progress, provenance
from fem.runs.tables import markdown_table, write_page
from fem_research.common.grid import Grid, publish
from fem_research.common.names import by_name, colours, display
from fem_research.common.paired import paired, shown
from fem_research.common.sweep import sweep
from fem_research.natural.data import bags, digest
from fem_research.natural.settings import SETS, NaturalRecipe
from fem_research.natural.training import train

REFERENCE = "pool:attention"


def run(recipe: NaturalRecipe, output: Path, workers: int | None = None) -> dict:
    """Run the jobs without a record in `output`/runs, write tables, page and plot; returns what results.json holds."""
    check_output(output, "natural")
    files = {name: digest(name, recipe.data) for name in recipe.set_names}
    label = {name: bags(name, recipe.data).label.tolist() for name in recipe.set_names}
    train_all = partial(sweep, train=partial(train, folder=recipe.data), workers=workers)
    found = {}
    with progress() as bars:
        for name in recipe.set_names:
            grid = Grid(output / RUNS, train_all, bars, f"natural: {name}")
            found[name] = grid.records(recipe.jobs(name, files[name]))
    scores = {name: {row: summary(row, records, recipe) for row in recipe.rows} for name, records in found.items()}
    for rows in scores.values():
        for row, of_row in rows.items():
            other = rows.get(REFERENCE) if row != REFERENCE else None
            of_row["over"] = (
                None if other is None else dict(zip(("mean", "error"), paired(of_row["right"], other["right"])))
            )
    floors = {name: max(Counter(of_set).values()) / len(of_set) for name, of_set in label.items()}
    overview = [
        {"pool": display(row)} | {name: mean(rows[row]["accuracy"]) for name, rows in scores.items()}
        for row in recipe.rows
    ]
    return publish(
        output,
        "natural",
        recipe,
        records=(
            ({"set": name} | {key: record["job"][key] for key in ("pool", "seed", "fold")}, record)
            for name, records in found.items()
            for record in records
        ),
        tables={"table": overview},
        page=lambda folder: write_report(folder, scores, floors, label, files, overview, recipe),
        results={"natural": scores, "constants": floors, "files": files},
        redraw=redraw,
        shown=("Accuracy by set, mean over repeats", overview),
    )


def summary(row: str, records: list[dict], recipe: NaturalRecipe) -> dict:
    """A pool on a set: its accuracy by repeat, every bag's share of right answers, and the rates that folds took."""
    own = [record for record in records if record["job"]["pool"] == row]
    right = [(record["job"]["seed"], bag, yes) for record in own for bag, yes in zip(record["bags"], record["right"])]
    repeats = range(recipe.seed, recipe.seed + recipe.seeds)
    return {
        "accuracy": [mean(yes for seed, _, yes in right if seed == repeat) for repeat in repeats],
        "right": [mean(yes for _, bag, yes in right if bag == one) for one in sorted({bag for _, bag, _ in right})],
        "loss": mean(record["curve"][-1]["loss"] for record in own),
        "rates": dict(sorted(Counter(f"{record['learning_rate']:g}" for record in own).items())),
        "parameters": own[0]["parameters"],
        "seconds": round(sum(record["seconds"] for record in own), 1),
    }


def table(rows: Mapping[str, dict]) -> list[dict]:
    lines = [
        {
            "pool": display(row),
            "accuracy": mean(found["accuracy"]),
            "over attention": "" if found["over"] is None else shown(found["right"], rows[REFERENCE]["right"]),
            "by repeat": ", ".join(f"{score:.3f}" for score in found["accuracy"]),
            "loss": found["loss"],
            "folds by rate": ", ".join(f"{rate}: {count}" for rate, count in found["rates"].items()),
            "parameters": found["parameters"],
            "seconds": found["seconds"],
        }
        for row, found in rows.items()
    ]
    return sorted(lines, key=lambda line: -line["accuracy"])


def redraw(results: Mapping, recipe: Mapping, folder: Path) -> None:
    """scores.png: a dot per repeat of every pool on every set."""
    from fem.plots import dots

    panels = {
        name: {row: found["accuracy"] for row, found in rows.items()} for name, rows in results["natural"].items()
    }
    dots(
        folder / "scores.png",
        "Accuracy on bags that were not trained on: a dot per repeat",
        {name: by_name(rows) for name, rows in panels.items()},
        colours(next(iter(panels.values()))),
        results["constants"],
        "the most frequent label",
    )


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
        f"answer; width {recipe.width}, {recipe.heads} heads, equal parameters (a pool with more gets narrower "
        "SwiGLUs). "
        f"{recipe.steps} steps of {recipe.batch} bags, AdamW without weight decay. Cross-validation in {recipe.folds} "
        f"parts, {recipe.seeds} times with other parts and weights. For every part the learning rate of "
        f"{recipe.learning_rates} is chosen by the loss on a quarter of the other bags, and the model is then trained "
        "on all of them. Features are standardised on the training bags. gated pooling: gated attention (Ilse et al., "
        "2018). ±: standard error of the paired difference over bags, each with its share of right answers. loss: "
        "cross-entropy in nats. Numbers in brackets: how a file's SHA-256 begins.",
        markdown_table(overview, dict.fromkeys(scores, max)),
        "![accuracy by set and pool](scores.png)",
        *sections,
        provenance(command_line("natural", recipe, NaturalRecipe())),
    )
