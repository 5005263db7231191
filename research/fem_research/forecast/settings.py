"""What `fem forecast` runs: data, models and training, as a recipe and its jobs."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from itertools import product
from typing import TYPE_CHECKING

from fem.config import MLPS
from fem.recipes import listed, option, require_not_negative, require_one_of, require_positive
from fem_research.common.grid import digest_of
from fem_research.common.mixers import canonical
from fem_research.common.names import display

if TYPE_CHECKING:
    import torch

    from fem_research.forecast.series import Series, Windows

NONE = "none"  # no mixer: no token sees another
BASELINES = ("dlinear", "patchtst", "itransformer", "femforecaster")
LOOKBACKS = {96: 1024, 336: 2048, 720: 4096}  # up to this horizon, this many rows of history
MANY_CHANNELS = 100
DTYPES = ("float32", "bfloat16")
NOT_IN_THE_KEY = ("data", "horizon", "models", "seeds", "seed", "threads")


def width_for(channels: int) -> int:
    """32 floor(sqrt(channels)): 64 for ETT, 128 for Weather, 352 for Solar."""
    return 32 * math.isqrt(channels)


@dataclass(frozen=True, kw_only=True)
class ForecastRecipe:
    """Data, models and training; lists have commas. The defaults suit a laptop: minutes per model on ETTh1."""

    data: str = option("", "CSV files (.csv or .csv.gz): a column date, then the channels.")
    horizon: str = option("96", "Rows to forecast.")
    models: str = option(
        "attention,FEM,none",
        f"With commas: attention, FEM-GLA, GLA ...; none, for no mixer; {', '.join(BASELINES)}.",
        called="mixers",
    )
    seeds: int = option(2, "How many seeds; every model has the same.")
    seed: int = option(0, "First seed: of weights, order and dropout.")
    lookback: int | None = option(None, "Rows of history; default: 1024 to 4096, by horizon.")
    width: int | None = option(None, "Width of the backbone; default: 32 floor(sqrt(channels)).")
    layers: int = option(3, "Blocks of the backbone.")
    heads: int = option(8, "Heads of every mixer.")
    mlp: str = option("narrowed", "MLP: narrowed to equal parameters, or kept, as in the paper.")
    dtype: str = option("float32", f"Arithmetic of the backbone's training: {' or '.join(DTYPES)}.")
    dropout: float = option(0.1, "Dropout of tokens and of each block's output.")
    beta_max_init: float = option(1.8, "Where FEM's inverse temperature starts, before the softplus.")
    epochs: int = option(3, "Most epochs of training the backbone, each over all windows.")
    patience: int = option(12, "Stop after so many epochs without a lower validation error.")
    batch: int | None = option(None, "Windows per step; default: 32, or 8 from 100 channels on.", called="batch_size")
    learning_rate: float = option(6e-4, "Peak learning rate of AdamW for the backbone.")
    weight_decay: float = option(0.1, "Weight decay of the weights; beta, norms and biases have none.")
    peer_lookback: str = option(
        "512",
        "Rows of history for neuralforecast's models; of several, with commas, the best on the validation rows.",
        called="baseline_lookback",
    )
    peer_steps: int = option(500, "Most optimiser steps for neuralforecast's models.", called="baseline_steps")
    peer_stride: int = option(
        1, "Rows between the windows that neuralforecast's models train and validate on.", called="baseline_stride"
    )
    threads: int = option(1, "CPU threads; more of them are faster on an idle machine, and slower on a busy one.")

    def __post_init__(self):
        counts = ("seeds", "layers", "heads", "epochs", "patience", "threads")
        sizes = ("lookback", "width", "batch", "peer_steps", "peer_stride")
        require_positive(self, *counts, "learning_rate", *sizes)
        require_not_negative(self, "seed", "weight_decay")
        require_one_of("mlp", self.mlp, MLPS)
        require_one_of("dtype", self.dtype, DTYPES)
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must lie in [0, 1), got {self.dropout}.")
        for name in ("horizon", "peer_lookback"):
            values = listed(getattr(self, name))
            if not values or not all(text.isdecimal() and int(text) > 0 for text in values):
                told = f"got {getattr(self, name)!r}."
                raise ValueError(f"{name} must be a positive number, or several with commas, {told}")
        if not self.model_names:
            raise ValueError("mixers must name at least one model, got an empty list.")
        if any("conv" in name.split("/") for name in self.model_names):
            raise ValueError(f"mixers must have no short convolution (/conv) here, got {self.models!r}.")

    @property
    def model_names(self) -> list[str]:
        """The models' canonical names, in the order given. Raises ValueError on an unknown name."""
        known = (NONE, *BASELINES)
        return list(dict.fromkeys(name if name in known else canonical(name) for name in listed(self.models)))

    @property
    def horizons(self) -> list[int]:
        return [int(text) for text in listed(self.horizon)]

    @property
    def peer_lookbacks(self) -> list[int]:
        return [int(text) for text in listed(self.peer_lookback)]

    def jobs(self) -> list[Job]:
        """All runs, seed by seed."""
        from fem_research.forecast.series import load_series

        if not listed(self.data):
            raise ValueError("data must name at least one CSV file, got none; give --data PATH.")
        series = [load_series(path) for path in listed(self.data)]
        names = [of.name for of in series]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"data must be files of different names, got {twice!r} twice; rename one.")
        seeds = range(self.seed, self.seed + self.seeds)
        jobs = [Job(*parts, self) for parts in product(series, self.horizons, seeds, self.model_names)]
        for job in jobs:
            for lookback in job.lookbacks:
                job.windows(lookback)
        return jobs


@dataclass(frozen=True)
class Job:
    """One run: a model with one seed on one series at one horizon."""

    series: Series
    horizon: int
    seed: int
    model: str
    recipe: ForecastRecipe

    @property
    def is_baseline(self) -> bool:
        return self.model in BASELINES

    @property
    def lookbacks(self) -> list[int]:
        """The rows of history that are tried: of a baseline there may be several."""
        return self.recipe.peer_lookbacks if self.is_baseline else [self.lookback]

    @property
    def lookback(self) -> int:
        """The rows of history of the backbone."""
        longest = next((rows for horizon, rows in LOOKBACKS.items() if self.horizon <= horizon), 6 * self.horizon)
        return self.recipe.lookback or longest

    @property
    def width(self) -> int:
        return self.recipe.width or width_for(len(self.series.channels))

    @property
    def batch(self) -> int:
        return self.recipe.batch or (8 if len(self.series.channels) >= MANY_CHANNELS else 32)

    @property
    def title(self) -> str:
        return f"{self.series.name} {self.horizon}: {display(self.model)}, seed {self.seed}"

    @property
    def key(self) -> str:
        """A file name that differs between runs which differ in any value or in their data."""
        decides = {name: value for name, value in asdict(self.recipe).items() if name not in NOT_IN_THE_KEY}
        for name, start in (("peer_stride", 1), ("dtype", "float32")):  # records from before these were stay valid
            if decides[name] == start:
                del decides[name]
        if self.recipe.peer_lookback.isdecimal():
            decides["peer_lookback"] = int(self.recipe.peer_lookback)
        digest = digest_of(decides, self.series.values.tobytes())
        return f"{self.series.name}-{self.horizon}-{self.model}-seed{self.seed}-{digest}"

    def windows(self, lookback: int, device: torch.device | str = "cpu") -> dict[str, Windows]:
        """The windows of every split. Raises ValueError where a split is too short for one."""
        from fem_research.forecast.series import windows

        if not self.is_baseline and lookback <= self.horizon:
            raise ValueError(f"lookback must be longer than the horizon {self.horizon}, got {lookback}.")
        return windows(self.series, lookback, self.horizon, device)


PROFILES: dict[str, dict] = {  # the fields that differ from the recipe's defaults
    "laptop": {},
    "paper": {
        "horizon": "96,192,336,720",
        "models": "fem-sm,fem-gla,fem-mamba/paper,fem-aft/paper,gla,itransformer,patchtst,dlinear,softmax,none",
        "seeds": 1,
        "epochs": 100,
        "dtype": "bfloat16",
        "peer_lookback": "512,1024,2048,4096",
        "peer_steps": 5000,
    },
}
