"""Differences between models over the same seeds, which means and standard deviations of each alone hide."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, stdev


def paired(ours: Sequence[int | float], theirs: Sequence[int | float]) -> tuple[float, float | None]:
    """Mean and standard error of ours - theirs, seed by seed; the error is None with a single seed."""
    if len(ours) != len(theirs):
        raise ValueError(f"paired seeds must be equally many, got {len(ours)} and {len(theirs)}.")
    differences = [a - b for a, b in zip(ours, theirs)]
    return float(mean(differences)), stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else None


def spread(values: Sequence[int | float]) -> float | None:
    """The standard deviation; None of a single value."""
    return stdev(values) if len(values) > 1 else None


def shown(ours: Sequence[int | float], theirs: Sequence[int | float], scale: int | float = 1, digits: int = 3) -> str:
    """`paired` as text, multiplied by `scale`: "+0.047 ± 0.012"."""
    return in_words(*paired(ours, theirs), scale, digits)


def in_words(mean: float, error: float | None, scale: int | float = 1, digits: int = 3) -> str:
    text = f"{scale * mean:+.{digits}f}"
    return text if error is None else f"{text} ± {scale * error:.{digits}f}"


def by_seed(values: Sequence[int | float], form: str = ".3f") -> str:
    return ", ".join(f"{value:{form}}" for value in values)
