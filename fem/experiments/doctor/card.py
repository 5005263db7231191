"""`fem doctor --gpu`: checks, each in a process of its own with a time limit; a page, and one line that sums it up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from fem.experiments.common.run import hardware, now, provenance, versions, write_json
from fem.experiments.common.tables import markdown_table
from fem.extras import installed

LIMIT = 600  # seconds that all steps together may take on a GPU
WITHOUT_GPU = 3  # times LIMIT for all steps, and ten times its own limit for each, where there is none


class Step(NamedTuple):
    """A group of checks. seconds: its time limit on a GPU. interpreted: without a GPU, Triton's interpreter runs it."""

    title: str
    seconds: int
    rows: Callable[[torch.device], Iterator[dict]]
    interpreted: bool = False


def software(device: torch.device) -> Iterator[dict]:
    """Versions; Triton 3.4 to 3.7.0 is known to miscompile some kernels for Hopper (flash-linear-attention #640)."""
    for name, found in versions().items():
        yield {"part": name, "found": found, "result": "ok"}
    found, result = installed("triton"), "ok"
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
    if found is None:
        result = "not installed: scans are read by the plain form"
    elif hopper and (3, 4) <= tuple(int(part) for part in found.split(".")[:3] if part.isdigit()) <= (3, 7, 0):
        result = "known to miscompile for Hopper: do not use kernels that fail below"
    yield {"part": "triton", "found": found or "missing", "result": result}


def compilation(device: torch.device) -> Iterator[dict]:
    from fem.experiments.doctor.launches import compile_all, few
    from fem.experiments.doctor.without_card import CARDS

    cards = list(CARDS)
    if device.type == "cuda":
        name = torch.cuda.get_device_properties(device).gcnArchName.split(":")[0] if torch.version.hip else None
        name = name or "sm_{}{}".format(*torch.cuda.get_device_capability(device))
        cards = [name] if name in CARDS else []
        if not cards:
            yield {"kernel": "all", "result": f"nothing is known of {name}; the checks below compile for it"}
    for found in compile_all(few(), cards):
        yield {**found._asdict(), "result": found.fault() or "ok"}


def steps() -> dict[str, Step]:
    from fem.experiments.doctor import checks, speed

    return {
        "software": Step("Versions", 30, software),
        "compile": Step("Kernels, compiled as they are launched", 120, compilation),
        "assumptions": Step("What kernels assume of the hardware", 30, checks.assumptions, True),
        "scans": Step("Scans against the plain form in float64", 180, checks.scans, True),
        "softmax": Step("Softmax reads against the plain form in float64", 60, checks.softmax),
        "situations": Step("A layer checkpointed, compiled, captured", 90, checks.situations),
        "offsets": Step("Tensors of more than 2^31 numbers", 30, checks.large_offsets),
        "training": Step("A train step", 60, speed.training),
        "decoding": Step("Decoding one token", 60, speed.decoding),
    }


def examine(output: Path, only: str | None = None, shown: Callable[[str], None] = print) -> dict:
    """Run the steps and write results.json and report.md to `output`; returns what results.json holds."""
    chosen = steps() if only is None else {name: steps()[name] for name in only.split(",")}
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    output.mkdir(parents=True, exist_ok=True)
    started, found = time.monotonic(), {}
    for name, step in chosen.items():
        slower, whole = (1, LIMIT) if device != "cpu" else (10, WITHOUT_GPU * LIMIT)
        limit = max(1, min(slower * step.seconds, whole - (time.monotonic() - started)))
        shown(f"{step.title} (at most {limit:.0f} s)")
        found[name] = _in_a_process(name, device, output / f"{name}.jsonl", limit, step.interpreted and device == "cpu")
    results = {"device": device, "hardware": hardware(), "versions": versions(), "date": now(), "steps": found}
    results["verdict"] = verdict(device, found)
    write_json(output / "results.json", results)
    (output / "report.md").write_text(page(results, chosen), encoding="utf-8")
    return results


def _in_a_process(name: str, device: str, path: Path, limit: int | float, interpreted: bool) -> dict:
    """Run one step: what it found before it ended, and how it ended."""
    path.unlink(missing_ok=True)
    environment = os.environ | {"TRITON_INTERPRET": "1" if interpreted else "0"}
    started = time.monotonic()
    try:
        command = [sys.executable, "-W", "ignore", "-m", __name__, name, device, str(path)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit)
        errors = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        ended = "ok" if done.returncode == 0 else errors[-1]
    except subprocess.TimeoutExpired:
        ended = f"stopped after {limit:.0f} s"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    path.unlink(missing_ok=True)
    return {"ended": ended, "seconds": round(time.monotonic() - started, 1), "rows": rows}


def verdict(device: str, found: dict) -> str:
    """One line: how many checks pass, which scans fall back to the plain form, how fast a train step is."""
    rows = [row for step in found.values() for row in step["rows"]]
    wrong = [row for row in rows if row["result"] != "ok"]
    unfinished = [name for name, step in found.items() if step["ended"] != "ok"]
    scans = found.get("scans", {"rows": []})["rows"]
    passed = sum(row["result"] == "ok" for row in scans)
    where = "No GPU here: by the interpreter and the compiler alone" if device == "cpu" else f"On {device}"
    text = f"{where}, {len(rows) - len(wrong)} of {len(rows)} checks pass"
    text += f"; {passed} of {len(scans)} kinds of scan pass" if scans else ""
    text += ", the others are read by the plain form" if passed < len(scans) else ""
    speeds = {row["layer"]: row for row in found.get("training", {"rows": []})["rows"] if row["result"] == "ok"}
    if device != "cpu" and "FEM, softmax" in speeds:
        text += f"; FEM takes {speeds['FEM, softmax']['of attention']:.2f} times attention's train step"
    if unfinished:
        text += f"; not finished: {', '.join(unfinished)}"
    return text + "."


def page(results: dict, chosen: dict[str, Step]) -> str:
    parts = [f"# fem doctor --gpu\n\n{results['verdict']}\n"]
    for name, step in results["steps"].items():
        parts.append(f"## {chosen[name].title}\n\nEnded: {step['ended']}, after {step['seconds']} s.\n")
        columns = list(dict.fromkeys(column for row in step["rows"] for column in row))
        if columns:
            parts.append(markdown_table([{column: row.get(column) for column in columns} for row in step["rows"]]))
        elif results["device"] == "cpu":
            parts.append("It needs a GPU: nothing was run.\n")
    return "\n".join([*parts, provenance("fem doctor --gpu")])


if __name__ == "__main__":
    name, device, path = sys.argv[1:]
    torch.set_num_threads(1)
    with open(path, "w", encoding="utf-8") as file:
        for row in steps()[name].rows(torch.device(device)):
            print(json.dumps(row), file=file, flush=True)
