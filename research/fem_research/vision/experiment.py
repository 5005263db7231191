"""`fem vision`: image classifiers of equal size that differ only in their mixer; table, picture and page."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd

from fem.provenance import provenance
from fem.tables import markdown_table
from fem.train.signals import end_process_group
from fem_research.common.grid import Grid, one_by_one, publish
from fem_research.common.measure import cpu_threads
from fem_research.common.names import display, sizes
from fem_research.common.paired import by_seed, shown, spread
from fem_research.runs.run import RUNS, check_output, command_line, progress
from fem_research.runs.tables import write_page
from fem_research.vision.images import Pictures, check, load_pictures, to_check
from fem_research.vision.settings import PROFILES, VisionRecipe
from fem_research.vision.training import model_config, train

IN_TABLE_3 = {"softmax": "DeiT", "softmax+CLTG": "FEM", "gla+CLTG": "FEM-GLA"}
PAPER = {  # top-1 accuracy and millions of parameters on ImageNet-1K, of deit-tiny and of deit-small
    "DeiT": ((72.20, 5.7), (79.90, 22.0)),
    "TNN": ((72.29, 6.4), (79.20, 23.4)),
    "HGRN": ((74.40, 6.1), (80.09, 23.7)),
    "HGRN2": ((75.39, 6.1), (80.12, 23.8)),
    "FEM": ((76.70, 5.8), (80.45, 22.3)),
    "FEM-GLA": ((75.80, 5.8), (80.20, 22.3)),
}
TABLE_3 = {f"deit-{size}": {name: row[i] for name, row in PAPER.items()} for i, size in enumerate(("tiny", "small"))}


def summary(records: Sequence[dict]) -> dict[str, dict]:
    """Means over the seeds, and what every seed has, by mixer."""
    several = {"accuracy": "accuracies", "loss": "losses", "images_per_second": "speeds"}
    means = {name: (name, "mean") for name in several} | {lists: (name, list) for name, lists in several.items()}
    rows = pd.DataFrame([{name: x for name, x in record.items() if name != "curve"} for record in records])
    mixers = rows.groupby("mixer", sort=False)
    return mixers.agg(**means, parameters=("parameters", "first")).to_dict("index")


def table(records: Sequence[dict]) -> list[dict]:
    """A row per mixer, with its difference from the first one, seed by seed."""
    scores = summary(records)
    first = next(iter(scores))
    percent = {mixer: [100 * accuracy for accuracy in score["accuracies"]] for mixer, score in scores.items()}
    over = {mixer: "" if mixer == first else shown(seeds, percent[first], digits=2) for mixer, seeds in percent.items()}
    return [
        {"mixer": display(mixer), "top-1, %": 100 * score["accuracy"], "sd": spread(percent[mixer])}
        | {f"over {display(first)}, paired": over[mixer], "by seed": by_seed(percent[mixer], ".1f")}
        | {"loss, nats": score["loss"], "parameters": score["parameters"], "images/s": score["images_per_second"]}
        for mixer, score in scores.items()
    ]


def table3(records: Sequence[dict], profile: str) -> list[dict]:
    """Table 3, the paper's figures beside ours; blank where not run."""
    ours = {IN_TABLE_3.get(mixer): score for mixer, score in summary(records).items()}
    rows = []
    for name in TABLE_3["deit-tiny"]:
        row = {"model": name}
        for size, paper in TABLE_3.items():
            found = ours.get(name) if size == profile else None
            row[f"{size}, paper"], row[f"{size}, M, paper"] = (f"{value:g}" for value in paper[name])
            row[f"{size}, ours"] = None if found is None else 100 * found["accuracy"]
            row[f"{size}, M, ours"] = None if found is None else found["parameters"] / 1e6
        rows.append(row)
    return rows


def write_report(folder: Path, records: Sequence[dict], recipe: VisionRecipe, profile: str, pictures: Pictures) -> None:
    data, size, patch = Path(recipe.data).name, recipe.image_size, recipe.patch_size
    write_page(
        folder,
        f"Images: FEM in the place of DeiT's attention, {data}",
        f"{data}: {pictures.counts[0]:,} training and {pictures.counts[1]:,} held-out pictures of "
        f"{len(pictures.classes)} classes, {size} x {size} pixels in patches of {patch} x {patch}; learnt positions, "
        f"{'class token' if recipe.pooling == 'cls' else 'mean over patches'}. All models have "
        f"{sizes(recipe.mlp, 'MLPs')}; they see the same pictures in the same order, and one "
        "learning rate. Accuracy is that after the last step, mean over seeds; sd: over seeds; paired: the difference "
        "seed by seed, ± its standard error; images/s: of training steps by the wall clock, so other programs on the "
        "machine slow them.",
        markdown_table(table(records), {"top-1, %": max, "loss, nats": min}),
        "![held-out accuracy, a dot per seed](scores.png)",
        "## Table 3: ImageNet-1K",
        "Top-1 accuracy and millions of parameters; blank: not run.",
        markdown_table(table3(records, profile)),
        provenance(command_line("vision", recipe, VisionRecipe(**PROFILES[profile]), profile)),
    )


def run(recipe: VisionRecipe, output: Path, profile: str = "digits") -> dict:
    """Run the jobs without a record, under torchrun on all processes, of which one writes; returns the results."""
    check_output(output, "vision", recipe)
    if recipe.recipe == "deit":
        import fem_research.vision.deit  # noqa: F401  before pictures are read: it says what is not installed
    pictures = load_pictures(recipe.data, recipe.stream)
    for job in recipe.jobs():
        model_config(job, pictures.classes)
    with cpu_threads(recipe.threads), progress() as bars:

        def train_all(missing: list[VisionRecipe], folder: Path) -> Iterator[dict]:
            if missing:
                files = to_check(pictures)
                bar = bars.add_task("reading pictures", total=len(files))
                check(files, recipe.channels, recipe.patch_size, lambda: bars.advance(bar))
            model_of = lambda job: output / "models" / job.key  # noqa: E731
            one = lambda job, checkpoints: train(job, pictures, checkpoints, model_of(job), bars)  # noqa: E731
            return one_by_one(missing, folder, one, _writes())

        records = Grid(output / RUNS, train_all, bars, "models").records(recipe.jobs())
    end_process_group()
    if not _writes():
        return {}
    rows = table(records)
    return publish(
        output,
        "vision",
        recipe,
        records,
        ("mixer", "seed"),
        tables={"table": rows},
        page=lambda folder: write_report(folder, records, recipe, profile, pictures),
        results={"vision": summary(records)},
        shown=(f"Image classifiers of equal size: {Path(recipe.data).name}", rows),
    )


def _writes() -> bool:
    return int(os.environ.get("RANK", 0)) == 0
