"""Measurements in cells: results.json of a run's folder, written after every cell, so that a stop loses one."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from fem.provenance import CONFIG, RESULTS, check_output, note, read_json, write_json
from fem_research.card_day.facts import circumstances_of_card
from fem_research.common.measure import Step, cpu_growth, cpu_seconds, gpu_seconds

GRAPHS = {"recompile_limit": 64, "fail_on_recompile_limit_hit": True}  # what is left uncompiled would not be told
FEWEST, MOST = 3, 20
SAME = {"recipe": "recipe", "hardware": "machine", "driver": "driver", "versions": "set of versions", "code": "commit"}
Key = tuple[str | int, ...]


def measure(step: Step, seconds: float, device: torch.device) -> dict[str, float | int | None]:
    """Median seconds, bytes that a step adds at its peak, and the seconds of the first step, which compiles."""
    cuda = device.type == "cuda"
    start = time.monotonic()
    step()
    if cuda:
        torch.cuda.synchronize()
    first = time.monotonic() - start
    gc.collect()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        grown = torch.cuda.max_memory_allocated() - before
    else:
        grown = cpu_growth(step)
    clock = gpu_seconds if cuda else cpu_seconds
    times: list[float] = []
    while len(times) < FEWEST or (sum(times) < seconds and len(times) < MOST):
        times.append(clock(step))
    return {"seconds": statistics.median(times), "steps": len(times), "extra_bytes": grown, "first_seconds": first}


def measured(step: Step, seconds: float, device: torch.device) -> dict:
    """`measure`, or {"failed": why} where the compiler, a library or too little memory ends a step."""
    try:
        return measure(step, seconds, device)
    except (RuntimeError, ImportError, ValueError, TypeError) as error:  # of other people's kernels, too
        return failed(error)


def failed(error: Exception) -> dict:
    return {"failed": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"}


def run(
    folder: Path,
    experiment: str,
    recipe: Mapping,
    keys: Sequence[Key],
    cell: Callable[[Key], dict],
    minutes: float,
    names: Sequence[str],
) -> dict:
    """The cell of every key, in order, until the time is over; those that the folder holds are kept.

    recipe: what all cells share; a folder with another one raises ValueError, as one of another card, commit or version
    does, since a folder says these once. names: of the parts of a key. Returns what results.json holds.
    """
    deadline = time.monotonic() + 60 * minutes
    check_output(folder, experiment)
    here = {"recipe": dict(recipe)} | circumstances_of_card()
    config = read_json(folder / CONFIG) or {"experiment": experiment} | here
    for name, what in SAME.items():
        if config.get(name) != here[name]:
            raise ValueError(
                f"output must hold cells of this {what}, got {str(folder)!r} with those of another; choose another."
            )
    found = read_json(folder / RESULTS) if (folder / RESULTS).exists() else {"cells": []}
    if found is None:
        raise ValueError(
            f"output must hold whole cells, got a damaged {str(folder / RESULTS)!r}; choose another folder."
        )
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / CONFIG, config)
    for key in keys:
        there = {tuple(one[name] for name in names) for one in found["cells"]}
        if key in there:
            continue
        if time.monotonic() > deadline:
            break
        torch._dynamo.reset()
        with torch._dynamo.config.patch(GRAPHS):
            one = dict(zip(names, key)) | cell(key)
        found["cells"].append(one)
        found["finished"] = there | {key} >= set(keys)
        write_json(folder / RESULTS, found)
        note(f"{', '.join(map(str, key))}: {in_words(one)}")
        gc.collect()
        torch.cuda.empty_cache()
    return found


def in_words(one: Mapping) -> str:
    parts = []
    for name, it in one.items():
        if isinstance(it, dict) and "failed" in it:
            parts.append(f"{name} failed, {it['failed']}")
        elif isinstance(it, dict) and "seconds" in it:
            parts.append(f"{name} {1e3 * it['seconds']:.2f} ms, {(it['extra_bytes'] or 0) / 2**20:.0f} MiB")
    return "; ".join(parts)


def beside(mine: Mapping, theirs: Mapping, steps: Sequence[str]) -> dict:
    """Milliseconds and MiB of the steps, and their ratios to those of the baseline."""
    row: dict = {}
    for name in steps:
        for field, unit, scale in (("seconds", "ms", 1e3), ("extra_bytes", "MiB", 2**-20)):
            ours, base = (it.get(name, {}).get(field) for it in (mine, theirs))
            row[f"{name} {unit}"] = None if ours is None else scale * ours
            row[f"{name} {unit} ratio"] = f"{ours / base:.2f}" if ours and base else None
    return row
