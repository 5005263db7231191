"""Tile sizes of linear attention's kernels, small enough for the shared memory of every card that they are compiled for
(docs/results/scan_kernels.md). They are not tuned on a GPU yet."""

from __future__ import annotations

from typing import NamedTuple

WIDEST_KEY = 256  # key channels that the kernels read
PASSING_KEYS = 16  # key channels of one program of `pass_states`
PASSING_WARPS = 4


class Blocks(NamedTuple):
    chunk: int  # tokens
    keys: int  # key channels at a time
    values: int  # value channels at a time, where a kernel takes them in turn
    warps: int

    def launch(self) -> dict[str, int | bool]:
        return {
            "CHUNK": self.chunk,
            "BLOCK": self.keys,
            "num_warps": self.warps,
            "num_stages": 1,
            "enable_fp_fusion": True,
        }


def widest_value(half_precision: bool) -> int:
    """Value channels that the kernels hold at once; wider heads are cut into heads of the same prior."""
    return 64 if half_precision else 32


def blocks_for(kernel: str, keys: int, values: int, half_precision: bool, warp: int = 32) -> Blocks:
    """keys, values: the widths of q, k and of v, padded to powers of two; warp: its threads. One chunk size for all."""
    if not half_precision:
        most = 16 if kernel == "channel_scores_gradients" else 32
        return Blocks(32, min(keys, most), min(values, 32), 8 * 32 // warp)
    gradients = kernel in ("remember_gradients", "channel_scores_gradients")
    warps = 4 if kernel == "channel_scores_gradients" else 8 * 32 // warp
    return Blocks(64, min(keys, 16 if gradients else 32), min(values, 32), warps)
