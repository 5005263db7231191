"""Measurements whose ratios hold on a busy machine: steps in turn, medians; memory in fresh processes."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any

import torch

Step = Callable[[], object]
FEWEST_TURNS, MOST_TURNS = 3, 31
ALLOCATOR = "MALLOC_MMAP_THRESHOLD_"


@contextmanager
def cpu_threads(count: int) -> Iterator[None]:
    """Compute with `count` threads: on a busy machine, small tensors take ten times longer with two than with one."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def alternate(steps: Mapping[str, Step], seconds: float, device: torch.device) -> dict[str, float]:
    """Median seconds of the steps, which are called in turn: process time on a CPU, else between two events."""
    clock = gpu_seconds if device.type == "cuda" else cpu_seconds
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(1 + MOST_TURNS):
        for name, step in steps.items():
            spent = clock(step)
            if turn:
                taken[name].append(spent)
        if turn >= FEWEST_TURNS and sum(map(sum, taken.values())) > seconds:
            break
    return {name: statistics.median(values) for name, values in taken.items()}


def gpu_seconds(step: Step) -> float:
    """Seconds of a step between two events of the current CUDA stream."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def cpu_seconds(step: Step) -> float:
    start = time.process_time()
    step()
    return time.process_time() - start


def operations(step: Step) -> int:
    """Floating-point operations of the step's matrix products, counted by torch's profiler (Appendix O)."""
    with torch.profiler.profile(with_flops=True) as profile:
        step()
    return sum(event.flops or 0 for event in profile.key_averages())


def gpu_growth(step: Step) -> int:
    """Bytes that a second call of the step adds at its peak to what was allocated before."""
    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def cpu_growth(function: Step) -> int | None:
    """Bytes by which resident memory rises at its peak during `function`; None where the system is not Linux."""
    if sys.platform != "linux":
        return None
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # forget the peak so far
    before = resident("VmRSS")
    function()
    return resident("VmHWM") - before


def resident(field: str) -> int:
    """Bytes of memory of this process, on Linux: "VmRSS" now, "VmHWM" at most."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def in_fresh_process(function: Callable, *arguments) -> Any:
    """function(*arguments) in a process of its own, whose allocator returns freed blocks to the system at once."""
    before = os.environ.get(ALLOCATOR)
    os.environ[ALLOCATOR] = str(1 << 16)
    try:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            return pool.submit(function, *arguments).result()
    finally:
        os.environ.pop(ALLOCATOR)
        if before is not None:
            os.environ[ALLOCATOR] = before
