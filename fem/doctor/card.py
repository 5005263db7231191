"""`fem doctor --gpu`: checks side by side, each in a process with a time limit; a page, and one line of verdict."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path

import torch

from fem import PRIORS
from fem.extras import installed
from fem.provenance import CONFIG, PAGE, RESULTS, check_output, hardware, now, provenance, versions, write_json
from fem.recipes import listed, require_some_of
from fem.tables import markdown_table

KERNELS = ("triton", "fla-core")  # packages by which scans are read
LIMIT = 1200  # seconds that a step may take: first calls compile, and flash-linear-attention's kernels tune themselves


def steps() -> dict[str, Callable[[torch.device], Iterator[dict]]]:
    """The checks by name; those of scans have the name of their prior."""
    from fem.doctor import checks

    return {
        **{prior: partial(checks.scans, prior=prior) for prior in PRIORS if prior != "softmax"},
        "softmax": checks.softmax,
        "layers": checks.layers,
        "model": checks.compiled_model,
    }


def examine(output: Path, only: str | None = None) -> dict:
    """Run the steps and write results.json and report.md to `output`; returns what results.json holds."""
    names = list(steps()) if only is None else listed(only)
    require_some_of("--only", names, steps())
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    check_output(output, "doctor")
    output.mkdir(parents=True, exist_ok=True)
    write_json(output / CONFIG, {"experiment": "doctor"})
    outcomes: dict = {}
    found = versions() | {name: installed(name) or "missing" for name in KERNELS}
    results = {"device": device, "hardware": hardware(), "versions": found, "date": now(), "steps": outcomes}
    print(f"{len(names)} steps side by side, at most {LIMIT} s each")
    pool = ThreadPoolExecutor(os.cpu_count())
    ends = {pool.submit(_in_a_process, name, device): name for name in names}
    try:
        for end in as_completed(ends):
            name = ends[end]
            outcomes[name] = found = end.result()
            print(f"{name}: {found['ended']}, {found['seconds']:.0f} s")
            results["verdict"] = verdict(device, outcomes)
            write_json(output / RESULTS, results)  # what is done stays, whatever becomes of the other steps
            (output / PAGE).write_text(page(results), encoding="utf-8")
    finally:
        pool.shutdown(cancel_futures=True)  # an interrupted run starts no further step
    return results


def _in_a_process(name: str, device: str) -> dict:
    """Run one step: what it found before it ended, a line each, and how it ended."""
    started = time.monotonic()
    try:
        command = [sys.executable, "-W", "ignore", "-m", __name__, name, device]
        done = subprocess.run(command, capture_output=True, timeout=LIMIT)
        errors = done.stderr.decode(errors="replace").strip().splitlines() or [f"status {done.returncode}"]
        found, ended = done.stdout, "ok" if done.returncode == 0 else errors[-1]
    except subprocess.TimeoutExpired as stopped:
        found, ended = stopped.stdout or b"", f"stopped after {LIMIT} s"
    rows = [json.loads(line) for line in found.splitlines() if line.startswith(b'{"check"')]
    return {"ended": ended, "seconds": round(time.monotonic() - started, 1), "rows": rows}


def verdict(device: str, outcomes: dict) -> str:
    """In words: how many checks pass, and which steps did not finish."""
    rows = [row for step in outcomes.values() for row in step["rows"]]
    wrong = [row for row in rows if row["result"] != "ok"]
    unfinished = sorted(name for name, step in outcomes.items() if step["ended"] != "ok")
    text = f"On {device}, {len(rows) - len(wrong)} of {len(rows)} checks pass"
    if unfinished:
        text += f"; not finished: {', '.join(unfinished)}"
    return text + "."


def page(results: dict) -> str:
    kernels = ", ".join(f"{name} {results['versions'][name]}" for name in KERNELS)
    parts = [f"# fem doctor --gpu\n\n{results['verdict']} Kernels of scans: {kernels}.\n"]
    for name, step in results["steps"].items():
        parts.append(f"## {name}\n\nEnded: {step['ended']}, after {step['seconds']} s.\n")
        columns = list(dict.fromkeys(column for row in step["rows"] for column in row))
        parts.append(markdown_table([{column: row.get(column) for column in columns} for row in step["rows"]]))
    return "\n".join([*parts, provenance("fem doctor --gpu")])


if __name__ == "__main__":
    name, device = sys.argv[1:]
    torch.set_num_threads(1)
    for row in steps()[name](torch.device(device)):
        print(json.dumps(row), flush=True)
