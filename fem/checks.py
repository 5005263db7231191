"""Checks of single values that configurations share; free of torch."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Iterable
from numbers import Integral, Real

SMALLEST = 1.1754943508222875e-38  # the smallest normal float32; smaller numbers may be flushed to 0


def positive_int(name: str, value, others: tuple = ()) -> int | None:
    """The value as an int. Raises ValueError, which names the `others` that may stand in its place: 0 or None."""
    if value is None and None in others:
        return None
    if isinstance(value, bool) or not isinstance(value, Integral) or value < (0 if 0 in others else 1):
        wanted = " or ".join(["a positive integer", *map(repr, others)])
        raise ValueError(f"{name} must be {wanted}, got {value!r}.")
    return int(value)


def is_number(value) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def finite_number(name: str, value, low: float, high: float) -> float:
    if not is_number(value) or not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {value!r}.")
    if not low <= value <= high:
        least = "positive" if low == SMALLEST else f"{low:g} or more"
        wanted = least if high == math.inf else f"in [{low:g}, {high:g}]"
        raise ValueError(f"{name} must be {wanted}, got {value!r}.")
    return float(value)


def require_text(name: str, value: str) -> None:
    """Raise ValueError on bytes that are no UTF-8, which a command line hands on as half characters."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name} must be text in UTF-8, got {value!r}.") from None


def unknown_field(owner: str, name: str, value, known: Collection[str]) -> TypeError:
    """The error for a field that a configuration, `owner`, does not have."""
    near = " or ".join(map(repr, difflib.get_close_matches(name, known, 2)))
    hint = f"did you mean {near}?" if near else f"known fields: {', '.join(known)}."
    return TypeError(f"{owner} has no field {name!r} (got {name}={value!r}); {hint}")


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a sentence that refuses a name: "; did you mean fem-sm-tiny?", or "." where none is near."""
    near = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {near[0]}?" if near else "."
