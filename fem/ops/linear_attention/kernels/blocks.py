"""Tile sizes of the keyed scan's kernels: chosen ahead of time for sm_90 (docs/results/scan_kernels_aot.md), not tuned
on a GPU yet."""

from __future__ import annotations

from typing import NamedTuple

WIDEST_KEY = 256
WIDEST_VALUE = 128
CARRIED_KEYS = 16  # key channels of one program that carries the memory
WARPS_OF_CARRY = 4


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


def blocks_for(kernel: str, keys: int, values: int, half_precision: bool) -> Blocks:
    """keys, values: the widths of q and k, and of v, powers of two. The chunk is the same for all kernels."""
    if not half_precision:
        return Blocks(32, min(keys, 32), min(values, 32), 4)
    wide = values > 64
    most = {
        "read": 32 if wide else 64,
        "memory_gradients": 32 if wide else 64,
        "remember_gradients": 16 if wide else 64,
        "channel_scores": 32,
        "channel_scores_gradients": 16,
    }
    return Blocks(64, min(keys, most.get(kernel, 64)), min(values, 64), 8)
