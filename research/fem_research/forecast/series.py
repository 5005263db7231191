"""Time series of several channels: split, scaled, cut into windows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

Range = tuple[int, int]


@dataclass(frozen=True)
class Series:
    """A table of numbers: values (rows, channels), and which rows are for training, validation and test."""

    name: str
    channels: tuple[str, ...]
    values: np.ndarray
    splits: dict[str, Range]

    def scaled(self) -> Float[Tensor, "rows channels"]:
        """Every channel minus its mean, divided by its standard deviation, both over the training rows."""
        train = self.values[slice(*self.splits["train"])]
        spread = train.std(0)
        return torch.tensor((self.values - train.mean(0)) / np.where(spread > 0, spread, 1.0), dtype=torch.float32)


class Windows(NamedTuple):
    """All windows of `lookback` rows and the `horizon` rows after them; each starts one row after the last."""

    rows: Float[Tensor, "rows channels"]
    lookback: int
    horizon: int

    def __len__(self) -> int:
        return max(0, len(self.rows) - self.lookback - self.horizon + 1)

    def take(self, index: Tensor) -> tuple[Float[Tensor, "b l c"], Float[Tensor, "b h c"]]:
        """History and future of the windows with these numbers."""
        every = self.rows.unfold(0, self.lookback + self.horizon, 1).transpose(1, 2)
        return every[index].split([self.lookback, self.horizon], 1)


def windows(series: Series, lookback: int, horizon: int, device: torch.device | str = "cpu") -> dict[str, Windows]:
    """The windows of each split, by its name, on the scaled rows.

    The futures of validation and test lie inside their split; their histories reach back before it.
    Raises ValueError where a split is too short for one window.
    """
    rows = series.scaled().to(device)
    found = {}
    for split, (start, stop) in series.splits.items():
        first = start if split == "train" else start - lookback
        found[split] = Windows(rows[max(first, 0) : stop], lookback, horizon)
        if first < 0 or not len(found[split]):
            raise ValueError(
                f"{series.name} is too short: its {split} rows [{start}, {stop}) hold no window of lookback {lookback} "
                f"and horizon {horizon}; choose smaller ones."
            )
    return found
