"""Time series of several channels: read from CSV files, split, scaled, cut into windows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
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
        return len(self.rows) - self.lookback - self.horizon + 1

    def take(self, index: Tensor) -> tuple[Float[Tensor, "b l c"], Float[Tensor, "b h c"]]:
        """History and future of the windows with these numbers."""
        every = self.rows.unfold(0, self.lookback + self.horizon, 1).transpose(1, 2)
        return every[index].split([self.lookback, self.horizon], 1)


def windows(series: Series, lookback: int, horizon: int, device: torch.device | str = "cpu") -> dict[str, Windows]:
    """The windows of each split, by its name, on the scaled rows.

    The futures of validation and test lie inside their split; their histories reach back before it.
    """
    first = {split: start if split == "train" else start - lookback for split, (start, _) in series.splits.items()}
    for split, (start, stop) in series.splits.items():
        if first[split] < 0 or stop - first[split] < lookback + horizon:
            raise ValueError(
                f"{series.name} is too short: its {split} rows [{start}, {stop}) hold no window of lookback {lookback} "
                f"and horizon {horizon}; choose smaller ones."
            )
    rows = series.scaled().to(device)
    return {split: Windows(rows[first[split] : stop], lookback, horizon) for split, (_, stop) in series.splits.items()}


DATE = "date"
ETT_CHANNELS = ("HUFL", "HULL", "MUFL", "MULL", "LUFL", "LULL", "OT")
ETT_HOURS = {"train": (0, 8640), "validation": (8640, 11520), "test": (11520, 14400)}
CHANNELS = {"weather": 21, "solar": 137}
UNEVEN = ("weather",)  # the published file lacks 8 of its 52,704 rows; everybody uses it as evenly spaced


def load_series(path: str | Path) -> Series:
    """The series in a CSV file, such as .csv or .csv.gz: a column `date`, then one per channel. Solar has no dates.

    ETT, Weather and Solar are recognised by the file's name. ETT is split into 12, 4 and 4 months, and rows after these
    are unused; all else is split .7 / .1 / .2.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"data must be a CSV file (.csv or .csv.gz), got no such file: {str(path)!r}.")
    name = path.name.partition(".")[0]
    try:
        table = pd.read_csv(path, header="infer" if _has_header(path) else None)
    except (ValueError, UnicodeDecodeError, OSError, EOFError) as error:
        raise ValueError(f"{path.name} cannot be read as a CSV file: {str(error).strip()}") from error
    table.columns = table.columns.map(str)
    kind = next((kind for kind in ("etth", "ettm", *CHANNELS) if name.lower().startswith(kind)), "")
    wanted = ([] if kind == "solar" else [DATE]) + [*ETT_CHANNELS] * kind.startswith("ett")
    if missing := [column for column in wanted if column not in table]:
        raise ValueError(f"{name} has no column {', '.join(missing)}; its columns are {', '.join(table.columns[:9])}.")
    if DATE in table and kind not in UNEVEN:
        _check_dates(path.name, table[DATE])
    table = table.drop(columns=DATE, errors="ignore")
    if table.shape[1] != CHANNELS.get(kind, table.shape[1] or 1):
        raise ValueError(f"{name} must have {CHANNELS.get(kind, 'at least 1')} channels, got {table.shape[1]}.")
    values = _numbers(path.name, table)
    name = kind if kind in CHANNELS else name  # published as solar_AL.txt, say
    return Series(name, tuple(table.columns), values, _splits(name, kind, len(values)))


def _has_header(path: Path) -> bool:
    """Whether the first line has a word; columns may be called 0, 1, 2."""
    return not pd.to_numeric(pd.read_csv(path, header=None, nrows=1, dtype=str).iloc[0], errors="coerce").notna().all()


def _check_dates(file: str, column: pd.Series) -> None:
    dates = pd.to_datetime(column, errors="coerce")
    for row in np.flatnonzero(dates.isna())[:1]:
        raise ValueError(f"{file} has a date that cannot be read in row {row + 1}: {column[row]!r}.")
    steps = dates.diff().iloc[1:]
    usual = steps.mode().min()
    for row in np.flatnonzero(steps != usual)[:1]:
        raise ValueError(
            f"{file} has a gap in its dates: {dates[row + 1]} follows {dates[row]}, where rows are {usual} apart; add "
            "the missing rows, or sort them."
        )


def _numbers(file: str, table: pd.DataFrame) -> np.ndarray:
    values = table.apply(pd.to_numeric, errors="coerce").to_numpy(np.float64)
    wrong = np.argwhere(~np.isfinite(values))
    if len(wrong):
        row, column = wrong[0]
        raise ValueError(
            f"{file} has {table.iloc[row, column]!s} in column {table.columns[column]}, row {row + 1}, where a finite "
            f"number is wanted ({len(wrong)} such cells in all); fill them in."
        )
    return values


def _splits(name: str, kind: str, rows: int) -> dict[str, Range]:
    if kind.startswith("ett"):
        quarters = 4 if kind == "ettm" else 1
        splits = {split: (quarters * start, quarters * stop) for split, (start, stop) in ETT_HOURS.items()}
        if rows < splits["test"][1]:
            raise ValueError(f"{name} is too short: its standard split needs {splits['test'][1]} rows, got {rows}.")
        return splits
    train, test = int(0.7 * rows), int(0.2 * rows)
    validation = int(0.1 * rows) if kind == "solar" else rows - train - test
    return {"train": (0, train), "validation": (train, train + validation), "test": (rows - test, rows)}
