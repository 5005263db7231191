"""How often a read had to be computed again to be exact."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor


class FallbackCount:
    """How many entries of the free energy all reads have computed, and how many of these were computed again.

    An entry is computed again where underflow cannot be ruled out (docs/equations.md). Warns once at more than 1 %.
    What kernels compute again they count on their device, where it stays until somebody asks.
    """

    def __init__(self):
        self.warned = False
        self._counters: dict[torch.device, Tensor] = {}
        self.reset()

    def reset(self) -> None:
        self.entries = self._recomputed = 0
        for counter in self._counters.values():
            counter.zero_()

    @property
    def recomputed(self) -> int:
        """Waits for the devices on which kernels count."""
        return self._recomputed + sum(int(counter) for counter in self._counters.values())

    def counter(self, entries: int, device: torch.device) -> Tensor:
        """What a kernel that reads so many entries adds those to that it computes again."""
        self.entries += entries
        if device not in self._counters:
            self._counters[device] = torch.zeros((), dtype=torch.int64, device=device)
        return self._counters[device]

    def count(self, entries: int, recomputed: int) -> None:
        self.entries += entries
        self._recomputed += recomputed
        if not self.warned and self._recomputed > 0.01 * self.entries:
            self.warned = True
            warnings.warn(
                f"{self._recomputed} of {self.entries} free energies spanned more than 60 nats and were computed "
                "again, exactly but up to 30 times slower; smaller values or a smaller beta avoid it.",
                stacklevel=3,
            )


fallbacks = FallbackCount()
