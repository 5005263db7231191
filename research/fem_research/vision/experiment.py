"""`fem vision`: image classifiers of equal size that differ only in their mixer; table, picture and page."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean

from fem.runs.run import RUNS, check_output, command_line, cpu_threads, progress, provenance
from fem.runs.tables import markdown_table, write_page
from fem_research.common import pictures
from fem_research.common.grid import Grid, one_by_one, publish
from fem_research.common.names import display
from fem_research.common.paired import shown, spread
from fem_research.vision.images import Pictures
from fem_research.vision.settings import PROFILES, VisionRecipe

IN_TABLE_3 = {"softmax": "DeiT", "softmax+CLTG": "FEM", "gla+CLTG": "FEM-GLA"}
TABLE_3 = {  # top-1 accuracy and millions of parameters on ImageNet-1K
    "deit-tiny": {
        "DeiT": (72.20, 5.7),
        "TNN": (72.29, 6.4),
        "HGRN": (74.40, 6.1),
        "HGRN2": (75.39, 6.1),
        "FEM": (76.70, 5.8),
        "FEM-GLA": (75.80, 5.8),
    },
    "deit-small": {
        "DeiT": (79.90, 22.0),
        "TNN": (79.20, 23.4),
        "HGRN": (80.09, 23.7),
        "HGRN2": (80.12, 23.8),
        "FEM": (80.45, 22.3),
        "FEM-GLA": (80.20, 22.3),
    },
}


def summary(records: Sequence[dict]) -> dict[str, dict]:
    """Means over the seeds, and every seed's accuracy, by mixer."""
    metrics = ("accuracy", "loss", "images_per_second")
    mixers = dict.fromkeys(record["mixer"] for record in records)
    own = {mixer: [record for record in records if record["mixer"] == mixer] for mixer in mixers}
    return {
        mixer: {metric: mean(record[metric] for record in found) for metric in metrics}
        | {"parameters": found[0]["parameters"], "accuracies": [record["accuracy"] for record in found]}
        for mixer, found in own.items()
    }


def table(records: Sequence[dict]) -> list[dict]:
    """A row per mixer, with its difference from the first one, seed by seed."""
    scores = summary(records)
    first = next(iter(scores))
    return [
        {
            "mixer": display(mixer),
            "top-1, %": 100 * score["accuracy"],
            "sd": spread([100 * accuracy for accuracy in score["accuracies"]]),
            f"over {display(first)}, paired": ""
            if mixer == first
            else shown(score["accuracies"], scores[first]["accuracies"], 100, 2),
            "seeds": ", ".join(f"{100 * accuracy:.1f}" for accuracy in score["accuracies"]),
            "loss, nats": score["loss"],
            "parameters": score["parameters"],
            "images/s": score["images_per_second"],
        }
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


def redraw(results: Mapping, recipe: Mapping, folder: Path) -> None:
    """vision.png, from what results.json holds: held-out accuracy after the last step, a dot per seed."""
    accuracies = {mixer: [100 * share for share in found["accuracies"]] for mixer, found in results["vision"].items()}
    title = "Held-out accuracy in percent: a dot per seed"
    pictures.scores(folder / "vision.png", title, {Path(recipe["data"]).name: accuracies})


def write_report(folder: Path, records: Sequence[dict], recipe: VisionRecipe, profile: str, pictures: Pictures) -> None:
    data, size, patch = Path(recipe.data).name, recipe.image_size, recipe.patch_size
    write_page(
        folder,
        f"Images: FEM in the place of DeiT's attention, {data}",
        f"{data}: {len(pictures.train):,} training and {len(pictures.test):,} held-out pictures of "
        f"{len(pictures.classes)} classes, {size} x {size} pixels in patches of {patch} x {patch}; learnt positions, "
        f"{'class token' if recipe.pooling == 'cls' else 'mean over patches'}. All models have the same number of "
        "parameters (a mixer that has more gets narrower MLPs); they see the same pictures in the same order, and one "
        "learning rate. Accuracy is that after the last step, mean over seeds; sd: over seeds; paired: the difference "
        "seed by seed, ± its standard error; images/s: of training steps by the wall clock, so other programs on the "
        "machine slow them.",
        markdown_table(table(records), {"top-1, %": max, "loss, nats": min}),
        "![held-out accuracy, a dot per seed](vision.png)",
        "## Table 3: ImageNet-1K",
        "Top-1 accuracy and millions of parameters; blank: not run. The recipe is DeiT's without RandAugment, random "
        "erasing and repeated augmentation.",
        markdown_table(table3(records, profile)),
        provenance(command_line("vision", recipe, VisionRecipe(**PROFILES[profile]), profile)),
    )


def run(recipe: VisionRecipe, output: Path, profile: str = "digits") -> dict:
    """Run the jobs without a record in `output`/runs, write table, plot and report; returns what results.json holds.

    Under torchrun every process trains and the first one writes. Models end in `output`/models.
    """
    from fem.train.distributed import end_process_group
    from fem_research.vision.images import check, load_pictures
    from fem_research.vision.training import model_config, train

    check_output(output, "vision", recipe)
    pictures = load_pictures(recipe.data)
    for job in recipe.jobs():
        model_config(job, pictures.classes)
    with cpu_threads(recipe.threads), progress() as bars:

        def train_all(missing: list[VisionRecipe], folder: Path) -> Iterator[dict]:
            if missing:
                files = bars.add_task("reading every picture", total=len(pictures.train) + len(pictures.test))
                check(pictures, recipe.channels, recipe.patch_size, lambda: bars.advance(files))
            models = output / "models"
            one = lambda job, place: train(job, pictures, place, models / f"{job.mixers}-seed{job.seed}", bars)  # noqa: E731
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
        redraw=redraw,
        shown=(f"Image classifiers of equal size: {Path(recipe.data).name}", rows),
    )


def _writes() -> bool:
    return int(os.environ.get("RANK", 0)) == 0
