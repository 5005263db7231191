"""Tile sizes of the softmax kernels, by the wider of the keys and of [v | E]: chosen ahead of time, so that nothing
spills in the forward and shared memory fits sm_90 (docs/results/kernels_aot.md); not tuned on a GPU yet."""

from __future__ import annotations

from typing import NamedTuple

ROWS = 32  # of one program in the kernels that only pass over rows


class Blocks(NamedTuple):
    queries: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None  # per thread at most: 128 lets two programs share a multiprocessor

    def launch(self) -> dict[str, int | bool | None]:
        return {
            "BLOCK_Q": self.queries,
            "BLOCK_K": self.keys,
            "num_warps": self.warps,
            "num_stages": self.stages,
            "maxnreg": self.registers,
            "enable_fp_fusion": True,
        }


Table = dict[int, tuple[Blocks, Blocks]]  # width: without a bias, with one

FORWARD: Table = {
    64: (Blocks(128, 32, 8, 3, registers=128), Blocks(128, 64, 8, 3)),
    128: (Blocks(128, 64, 8, 3), Blocks(128, 64, 8, 3)),
    256: (Blocks(64, 32, 8, 2), Blocks(64, 32, 8, 2)),
}
KEY_GRADIENTS: Table = {
    32: (Blocks(64, 128, 8, 2), Blocks(64, 64, 8, 2)),
    64: (Blocks(64, 128, 8, 2), Blocks(64, 128, 8, 2)),
    128: (Blocks(32, 128, 8, 2), Blocks(32, 64, 8, 2)),
    256: (Blocks(32, 32, 8, 1), Blocks(32, 32, 8, 1)),
}
QUERY_GRADIENTS: Table = {
    64: (Blocks(128, 64, 8, 2, registers=128), Blocks(128, 64, 8, 2)),
    128: (Blocks(128, 64, 8, 2), Blocks(128, 32, 8, 2)),
    256: (Blocks(64, 32, 8, 2), Blocks(64, 16, 8, 2)),
}
# Heads that form their [v | E]: no more queries than share a shift.
WIDE_FORWARD: Table = {
    64: (Blocks(64, 32, 4, 2), Blocks(64, 32, 4, 2)),
    128: (Blocks(64, 32, 8, 2), Blocks(64, 32, 8, 2)),
    256: (Blocks(32, 16, 8, 1), Blocks(32, 16, 8, 1)),
}
WIDE_KEY_GRADIENTS: Table = {
    64: (Blocks(64, 32, 8, 1), Blocks(64, 32, 8, 1)),
    128: (Blocks(64, 32, 8, 1), Blocks(64, 16, 8, 1)),
    256: (Blocks(64, 16, 8, 1), Blocks(64, 16, 8, 1)),
}
WIDE_QUERY_GRADIENTS: Table = {
    64: (Blocks(64, 32, 8, 2), Blocks(64, 32, 8, 2)),
    128: (Blocks(64, 32, 8, 2), Blocks(64, 32, 8, 2)),
    256: (Blocks(16, 16, 8, 1), Blocks(16, 16, 8, 1)),
}
WIDEST = max(FORWARD)


def blocks_for(table: Table, width: int, half_precision: bool, biased: bool) -> Blocks:
    if not half_precision:
        return Blocks(32 if width <= 64 else 16, 32, 8, 1)
    return next(pair[biased] for limit, pair in table.items() if width <= limit)


def padded(width: int) -> int:
    """The width of a tile that holds `width` columns."""
    return max(16, 1 << (width - 1).bit_length())
