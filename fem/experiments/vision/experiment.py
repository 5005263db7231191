"""`fem vision`: image classifiers of equal size that differ in their mixer alone."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

from fem.experiments.common.jobs import read_record
from fem.experiments.common.lock import one_writer
from fem.experiments.common.run import check_output, cpu_threads, open_run, progress, write_json
from fem.experiments.common.tables import show_table, write_table
from fem.experiments.vision.settings import VisionRecipe


def run(recipe: VisionRecipe, output: Path, profile: str = "digits") -> dict:
    """Run the jobs without a record in `output`/runs, write table, plot and report; returns what results.json holds.

    Under torchrun every process trains and the first one writes. Models end in `output`/models.
    """
    from fem.experiments.common.distributed import end_process_group
    from fem.experiments.vision import report
    from fem.experiments.vision.images import check, load_pictures
    from fem.experiments.vision.training import model_config, train

    check_output(output, "vision")
    pictures = load_pictures(recipe.data)
    for _, job in recipe.jobs():
        model_config(job, pictures.classes)
    runs = output / "runs"
    records = {name: record for name, _ in recipe.jobs() if (record := read_record(runs / f"{name}.json"))}
    with cpu_threads(recipe.threads), progress() as bars:
        if len(records) < len(list(recipe.jobs())):
            files = bars.add_task("reading every picture", total=len(pictures.train) + len(pictures.test))
            check(pictures, recipe.channels, recipe.patch_size, lambda: bars.advance(files))
        for name, job in recipe.jobs():
            if name not in records:
                model = output / "models" / f"{job.mixers}-seed{job.seed}"
                (runs / name).mkdir(parents=True, exist_ok=True)
                with one_writer(runs / name) if _writes() else nullcontext():
                    records[name] = train(job, pictures, runs / name, model, bars)
                if _writes():
                    write_json(runs / f"{name}.json", records[name])
    end_process_group()
    if not _writes():
        return {}
    records = list(records.values())
    rows = report.table(records)
    with open_run(output, "vision", recipe) as under_way:
        for record in records:
            for point in record["curve"]:
                under_way.log(experiment="vision", mixer=record["mixer"], seed=record["seed"], **point)
        write_table(under_way.folder, "table", rows)
        page = report.page(records, recipe, profile, pictures)
        (under_way.folder / "report.md").write_text(page, encoding="utf-8")
        results = under_way.finish({"vision": report.summary(records)})
        report.redraw(results, asdict(recipe), under_way.folder)
    show_table(f"Image classifiers of equal size: {Path(recipe.data).name}", rows)
    return results


def _writes() -> bool:
    return int(os.environ.get("RANK", 0)) == 0
