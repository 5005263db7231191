"""Fields of recipes, and the checks that they share: lists with commas, limits, and names to choose from."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import field
from typing import Any

TOO_LARGE = 1e36  # a step of float32 with such a rate overflows


def option(default: Any, help: str, called: str | None = None, shown: Callable[[str], str] | None = None) -> Any:
    """A field of a recipe: its default, and the line that explains it in the command's help.

    called: its name on the command line, where that is not the field's. shown: how a page writes the value, where that
    differs from the value itself.
    """
    return field(default=default, metadata={"help": help, "called": called, "shown": shown})


def listed(text: str) -> list[str]:
    """The names in a list with commas between them, each once."""
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def require_positive(recipe: Any, *names: str) -> None:
    """Raises ValueError where one of these fields is not positive, or too large. None, for a default, passes."""
    for name in names:
        value = getattr(recipe, name)
        if value is not None and not 0 < value < TOO_LARGE:
            raise ValueError(f"{name} must be {f'below {TOO_LARGE:g}' if value > 0 else 'positive'}, got {value}.")


def require_not_negative(recipe: Any, *names: str) -> None:
    """Raises ValueError where one of these fields is negative, too large or no number, and on a seed from 2^32 on.
    None, for a default, passes.
    """
    for name in names:
        if name == "seed" and recipe.seed >= 2**32:
            raise ValueError(f"seed must be below 2^32, got {recipe.seed}.")
        value = getattr(recipe, name)
        if value is not None and not 0 <= value < TOO_LARGE:
            wanted = f"be below {TOO_LARGE:g}" if value > 0 else "not be negative"
            raise ValueError(f"{name} must {wanted}, got {value}.")


def require_one_of(name: str, value: str, known: Collection[str]) -> None:
    """Raises ValueError where the field's value is none of those known."""
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}; got {value!r}.")


def require_some_of(name: str, values: Sequence[str], known: Collection[str]) -> None:
    """Raises ValueError where a list is empty or names anything that is not known."""
    unknown = [value for value in values if value not in known]
    if unknown or not values:
        raise ValueError(f"{name} must be from {', '.join(known)}; got {', '.join(map(repr, unknown)) or 'none'}.")
