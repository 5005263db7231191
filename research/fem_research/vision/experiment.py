"""`fem vision`: image classifiers of equal size that differ in their mixer alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from fem.runs.run import RUNS, check_output, cpu_threads, progress
from fem_research.common.grid import Grid, one_by_one, publish
from fem_research.vision.settings import VisionRecipe


def run(recipe: VisionRecipe, output: Path, profile: str = "digits") -> dict:
    """Run the jobs without a record in `output`/runs, write table, plot and report; returns what results.json holds.

    Under torchrun every process trains and the first one writes. Models end in `output`/models.
    """
    from fem.train.distributed import end_process_group
    from fem_research.vision import report
    from fem_research.vision.images import check, load_pictures
    from fem_research.vision.training import model_config, train

    check_output(output, "vision")
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
    rows = report.table(records)
    return publish(
        output,
        "vision",
        recipe,
        records=(({"mixer": record["mixer"], "seed": record["seed"]}, record) for record in records),
        tables={"table": rows},
        page=lambda folder: report.write_report(folder, records, recipe, profile, pictures),
        results={"vision": report.summary(records)},
        redraw=report.redraw,
        shown=(f"Image classifiers of equal size: {Path(recipe.data).name}", rows),
    )


def _writes() -> bool:
    return int(os.environ.get("RANK", 0)) == 0
