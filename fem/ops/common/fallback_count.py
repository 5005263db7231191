"""How often a read had to be computed again to be exact."""

from __future__ import annotations

import warnings


class FallbackCount:
    """How many entries of the free energy all reads have computed, and how many of these were computed again.

    An entry is computed again where underflow cannot be ruled out (docs/equations.md). Warns once at more than 1 %.
    """

    def __init__(self):
        self.warned = False
        self.reset()

    def reset(self) -> None:
        self.entries = self.recomputed = 0

    def count(self, entries: int, recomputed: int) -> None:
        self.entries += entries
        self.recomputed += recomputed
        if not self.warned and self.recomputed > 0.01 * self.entries:
            self.warned = True
            warnings.warn(
                f"{self.recomputed} of {self.entries} free energies spanned more than 60 nats and were computed "
                "again, exactly but up to 10 times slower; smaller values or a smaller beta avoid it.",
                stacklevel=3,
            )


fallbacks = FallbackCount()
