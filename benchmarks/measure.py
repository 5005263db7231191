"""Ratios that hold on a busy machine: process CPU time, alternating, medians; memory in fresh processes."""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch

from fem.experiments.recipe import processor
from fem.experiments.report import markdown_table


def alternate(functions: dict[str, Callable[[], object]], repeats: int = 31, warmup: int = 3) -> dict[str, float]:
    """Median CPU seconds of every function, called in turn."""
    seconds = {name: [] for name in functions}
    for turn in range(warmup + repeats):
        for name, function in functions.items():
            start = time.process_time()
            function()
            if turn >= warmup:
                seconds[name].append(time.process_time() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def peak_growth(function: Callable[[], object]) -> int:
    """Bytes by which resident memory peaks above its start during `function`. Linux alone."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # forget the peak so far
    before = _resident("VmRSS")
    function()
    return _resident("VmHWM") - before


def _resident(field: str) -> int:
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def in_fresh_process(script: str, *arguments: str) -> str:
    """What `python script arguments` prints."""
    return subprocess.run([sys.executable, script, *arguments], check=True, capture_output=True, text=True).stdout


def environment() -> dict[str, str]:
    return {
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "processor": f"{processor()}, {torch.backends.cpu.get_cpu_capability()}",
        "threads": str(torch.get_num_threads()),
    }


def save(path: str, title: str, results: object, rows: list[dict[str, str]], note: str) -> None:
    """`path`.json with everything measured, and `path`.md with the table that a reader wants."""
    facts = environment()
    with open(f"{path}.json", "w") as file:
        json.dump({"environment": facts, "results": results}, file, indent=1)
    stamp = ", ".join(f"{name} {value}" for name, value in facts.items())
    with open(f"{path}.md", "w") as file:
        file.write(f"# {title}\n\n{note}\n\n{markdown_table(rows)}\n{stamp}.\n")
    print(markdown_table(rows))
