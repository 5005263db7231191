"""How often a read had to be computed again to be exact."""

from __future__ import annotations

import warnings


class FallbackCount:
    """Entries of the free energy that were read, and those of them that were computed again, by every op together.

    It is where underflow cannot be ruled out; see docs/equations.md. Warns once when more than 1 % are.
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
                f"{self.recomputed} of {self.entries} free energies spanned more than 60 nats and were computed again, "
                "exactly but up to 30 times slower; smaller values or a smaller beta avoid it.",
                stacklevel=3,
            )


fallbacks = FallbackCount()
