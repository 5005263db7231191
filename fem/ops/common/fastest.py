"""Which implementation is fastest on this device: measured once for each kind of call, and remembered."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Mapping

import torch

Step = Callable[[], object]
_WARM_UPS, _REPEATS = 2, 5


def gpu_seconds(step: Step) -> float:
    """Seconds of a step between two events of the current CUDA stream."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def warm_gpu_seconds(step: Step) -> float:
    """Median seconds of a step, once it is warm."""
    for _ in range(_WARM_UPS):
        step()
    return statistics.median(gpu_seconds(step) for _ in range(_REPEATS))


class Fastest:
    """Remembers for every kind of call how long each candidate took. clock: seconds of a step."""

    def __init__(self, clock: Callable[[Step], float] = warm_gpu_seconds):
        self.clock = clock
        self.seconds: dict[Hashable, dict[str, float]] = {}

    def choose(self, kind: Hashable, candidates: Mapping[str, Step]) -> str:
        """The name of the fastest candidate. The first stands in where nothing can be measured: in a graph that is
        traced or captured, and where every candidate fails.
        """
        default = next(iter(candidates))
        if kind not in self.seconds:
            if not _may_measure():
                return default
            self.seconds[kind] = self._measure(candidates)
        return min(self.seconds[kind], key=self.seconds[kind].__getitem__, default=default)

    def _measure(self, candidates: Mapping[str, Step]) -> dict[str, float]:
        seconds = {}
        for name, step in candidates.items():
            try:
                seconds[name] = self.clock(step)
            except (RuntimeError, ValueError, ImportError):  # does not fit, or has no kernel for it
                continue
        return seconds


def _may_measure() -> bool:
    if torch.compiler.is_compiling():
        return False
    return not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


fastest = Fastest()
