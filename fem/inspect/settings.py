"""The recipe of `fem inspect`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

MOST_TOKENS = 64


@dataclass(frozen=True, kw_only=True)
class InspectRecipe:
    """A text, and the layers whose reading of it is shown."""

    seed: ClassVar[int] = 0  # nothing is drawn

    text: str
    layers: str | None = None
    model: str = ""  # its folder, as the record of the run has it

    def __post_init__(self):
        if not self.text.strip():
            raise ValueError(f"text must hold something to read, got {self.text!r}.")
        self.chosen(1)

    def chosen(self, count: int) -> list[int]:
        """The layers to show of a model that has `count`, numbered from 1; all where none are named."""
        if self.layers is None:
            return list(range(1, count + 1))
        try:
            return sorted({int(number) for number in self.layers.split(",")})
        except ValueError as error:
            raise ValueError(f'layers must be numbers such as "1,4", got {self.layers!r}.') from error
