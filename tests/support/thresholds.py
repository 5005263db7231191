"""Inputs at the thresholds at which the reads change their method."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from torch import Tensor


@contextmanager
def flushed():
    """Numbers below 1e-38 become 0, as on a GPU."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush small numbers to zero")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def one_spike_behind_two_tokens(time: int = 64) -> tuple[Tensor, Tensor]:
    """Values whose largest, 0, is the last; the other rows see -60, then -87.6, which underflows beside it."""
    v = torch.full((1, time, 1, 8), -87.6)
    v[0, 0], v[0, -1] = -60.0, 0.0
    return v, torch.ones(1, 8)
