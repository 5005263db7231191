"""`fem mad`: a sweep over tasks, mixers and seeds that ends in Table 1."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated

import torch
import typer

from fem.experiments.common.baselines import available
from fem.experiments.common.blocks import INITIALISATIONS
from fem.experiments.common.grid import RUNS, Grid, publish
from fem.experiments.common.mixers import PUBLISHED, known
from fem.experiments.common.options import recipe_options
from fem.experiments.common.recipes import (
    listed,
    numbers,
    require_not_negative,
    require_one_of,
    require_positive,
    require_some_of,
)
from fem.experiments.common.run import check_output, command_line, option, progress
from fem.experiments.common.sweep import sweep
from fem.experiments.mad.settings import PROFILES, Profile
from fem.experiments.mad.table import SCORES, readable, scored, table1
from fem.experiments.mad.tasks import TASKS
from fem.experiments.mad.training import Job, train


@dataclass(frozen=True, kw_only=True)
class MADRecipe:
    """What a sweep compares. Lists are names or numbers with commas between them."""

    profile: str = option("laptop", f"Which settings, sizes and training: {' or '.join(PROFILES)}.")
    mixers: str = option(
        "attention,FEM",
        "With commas, such as attention, attention+CL, FEM-Mamba; on a GPU also fla:DeltaNet and the like.",
    )
    tasks: str = option("all", f"all, or some of {', '.join(TASKS)}.")
    initialisations: str = option(
        "normal", f"How the linear maps of all models start: {' or '.join(INITIALISATIONS)}, or both."
    )
    learning_rates: str | None = option(None, "Learning rates to take the best of, instead of the profile's.")
    weight_decays: str | None = option(None, "Weight decays to take the best of, instead of the profile's.")
    seeds: int = option(3, "How many seeds; each draws its own data and weights.")
    seed: int = option(0, "First seed.")

    def __post_init__(self):
        require_one_of("profile", self.profile, PROFILES)
        require_some_of("tasks", self.task_names, TASKS)
        require_some_of("initialisations", listed(self.initialisations), INITIALISATIONS)
        require_positive(self, "seeds")
        require_not_negative(self, "seed")
        self.jobs()

    @property
    def task_names(self) -> list[str]:
        return list(TASKS) if self.tasks == "all" else listed(self.tasks)

    @property
    def fixed(self) -> Profile:
        """The profile, with the learning rates and weight decays that were given."""
        given = {name: getattr(self, name) for name in ("learning_rates", "weight_decays") if getattr(self, name)}
        return replace(PROFILES[self.profile], **{name: numbers(name, text) for name, text in given.items()})

    def jobs(self) -> list[Job]:
        """All runs, seed by seed, so that a stopped sweep has compared all mixers on its first seeds."""
        profile = self.fixed
        mixers = dict.fromkeys(known(name) for name in listed(self.mixers))
        if not mixers:
            raise ValueError("mixers must name at least one mixer, got an empty list.")
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if absent := [name for name in mixers if name in PUBLISHED and not available(PUBLISHED[name], device)]:
            raise ValueError(
                f"mixers of flash-linear-attention need it installed and a GPU; here {', '.join(absent)} cannot run."
            )
        return [
            Job(
                mixer=mixer,
                setting=setting,
                initialisation=initialisation,
                learning_rate=learning_rate,
                weight_decay=weight_decay,
                seed=seed,
                training=profile.training,
            )
            for seed, setting, initialisation, mixer, learning_rate, weight_decay in product(
                range(self.seed, self.seed + self.seeds),
                (setting for setting in profile.settings if setting.task in self.task_names),
                listed(self.initialisations),
                mixers,
                profile.learning_rates,
                profile.weight_decays,
            )
        ]


def run(recipe: MADRecipe, output: Path, workers: int | None = None) -> dict:
    """Run the jobs that have no record in `output`/runs, write table and plots; returns what results.json holds."""
    from fem.experiments.mad import picture
    from fem.experiments.mad.report import summary, write_report

    check_output(output, "mad")
    train_all = partial(sweep, train=train, workers=workers)
    with progress() as bars:
        records = Grid(output / RUNS, train_all, bars, "MAD", told).records(recipe.jobs())
    profile = recipe.fixed
    table = table1(scored(records, profile.score))

    def page(folder: Path) -> None:
        picture.curves(folder / "curves.png", records)
        write_report(folder / "report.md", records, profile, command_line("mad", recipe, MADRecipe()))

    return publish(
        output,
        "mad",
        recipe,
        ((said(record["job"]), record) for record in records),
        {"table": table},
        page,
        {"mad": summary(records)},
        picture.redraw,
        (
            f"MAD, {recipe.profile} profile: {SCORES[profile.score]}, percent",
            readable([row for row in table if row["seeds"]], False),
        ),
    )


def told(record: dict) -> str:
    job = record["job"]
    return f": {job['mixer']}, {job['setting']['task']}, seed {job['seed']}: {record['curve'][-1]['micro']:.1%}"


def said(job: dict) -> dict:
    shared = ("mixer", "initialisation", "learning_rate", "seed")
    return {"task": job["setting"]["task"]} | {name: job[name] for name in shared}


@recipe_options(MADRecipe())
def command(
    changes: dict,
    output: Annotated[Path | None, typer.Option(help="Folder of the sweep; default: runs/mad-PROFILE.")] = None,
    workers: Annotated[int | None, typer.Option(help="Runs at a time; default: one per core, or four per GPU.")] = None,
):
    """Table 1: six synthetic tasks that probe a mixer (MAD). The same command resumes a stopped sweep."""
    recipe = replace(MADRecipe(), **changes)
    output = output or Path(f"runs/mad-{recipe.profile}")
    run(recipe, output, workers)
    typer.echo(f"written to {output}: report.md, results.json, table and plots")
