"""What `fem mad` compares, as a recipe."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING

from fem.runs.recipes import (
    INITIALISATIONS,
    listed,
    numbers,
    require_not_negative,
    require_one_of,
    require_positive,
    require_some_of,
)
from fem.runs.run import option
from fem_research.common.mixers import known
from fem_research.common.names import as_shown
from fem_research.mad.settings import PROFILES, Profile
from fem_research.mad.tasks import TASKS

if TYPE_CHECKING:
    from fem_research.mad.training import Job


@dataclass(frozen=True, kw_only=True)
class MADRecipe:
    """What a sweep compares. Lists are names or numbers with commas between them."""

    profile: str = option("laptop", f"Which settings, sizes and training: {' or '.join(PROFILES)}.")
    mixers: str = option(
        "attention,FEM",
        "With commas, such as attention, attention+CL, FEM-Mamba; on a GPU also fla:DeltaNet and the like.",
        shown=as_shown,
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
        require_some_of("tasks", self.task_names, self.known_tasks)
        require_some_of("initialisations", listed(self.initialisations), INITIALISATIONS)
        require_positive(self, "seeds")
        require_not_negative(self, "seed")
        self.jobs()

    @property
    def known_tasks(self) -> list[str]:
        return list(dict.fromkeys(setting.task for setting in PROFILES[self.profile].settings))

    @property
    def task_names(self) -> list[str]:
        return self.known_tasks if self.tasks == "all" else listed(self.tasks)

    @property
    def fixed(self) -> Profile:
        """The profile, with the learning rates and weight decays that were given."""
        given = {name: getattr(self, name) for name in ("learning_rates", "weight_decays") if getattr(self, name)}
        return replace(PROFILES[self.profile], **{name: numbers(name, text) for name, text in given.items()})

    def jobs(self) -> list[Job]:
        """All runs, seed by seed, so that a stopped sweep has compared all mixers on its first seeds."""
        import torch

        from fem_research.common.baselines import PUBLISHED, available
        from fem_research.mad.training import Job

        profile = self.fixed
        mixers = dict.fromkeys(known(name) for name in listed(self.mixers))
        if not mixers:
            raise ValueError("mixers must name at least one mixer, got an empty list.")
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if absent := [name for name in mixers if name in PUBLISHED and not available(PUBLISHED[name], device)]:
            raise ValueError(
                f"mixers of flash-linear-attention need it installed and a GPU; here {', '.join(absent)} cannot run."
            )
        varied = {
            "seed": range(self.seed, self.seed + self.seeds),
            "setting": [setting for setting in profile.settings if setting.task in self.task_names],
            "initialisation": listed(self.initialisations),
            "mixer": mixers,
            "learning_rate": profile.learning_rates,
            "weight_decay": profile.weight_decays,
        }
        return [Job(training=profile.training, **dict(zip(varied, values))) for values in product(*varied.values())]
