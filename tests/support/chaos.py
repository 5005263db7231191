"""Trainings that are killed, stopped or run out of disk at random moments, and then resumed: the outcome of each.

    python tests/support/chaos.py [--output FOLDER] [--seed N] [--work FOLDER]

writes chaos.md and chaos.json. Every case ends with the weights of an undisturbed training, bit for bit ("same"), or is
a fault: "silent" (a full disk that is not told), "traceback", "lost".
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import signal
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

from forked import Ended, Training, ready  # noqa: E402
from trainings import tiny, weights, write_corpus  # noqa: E402

SIGNALS = {"SIGKILL": 30, "SIGTERM": 10, "SIGUSR1": 3, "SIGHUP": 3, "SIGINT": 3}  # and how many cases of each
ROOMS = (5_000, 40_000, 150_000, 300_000)  # bytes
FULL_DISK, STEPS = "full disk", 12
FAULTS = ("silent", "traceback", "lost")


@dataclass(frozen=True)
class Case:
    """kind: "SIGKILL", ..., "full disk"; what: the moment as a share of an undisturbed training, or bytes."""

    kind: str
    what: float


def cases(seed: int) -> list[Case]:
    draw = random.Random(seed)
    found = [Case(kind, round(draw.uniform(0.2, 1.0), 3)) for kind, count in SIGNALS.items() for _ in range(count)]
    return found + [Case(FULL_DISK, room) for room in ROOMS]


class Chaos:
    """Runs cases against an undisturbed training of the same recipe, which is made once in `folder`."""

    def __init__(self, folder: Path, seed: int):
        self.folder = folder
        self.data, self.whole = folder / "data.jsonl", folder / "whole"
        write_corpus(self.data, seed=seed)
        ready()
        shutil.rmtree(self.whole, ignore_errors=True)
        began = time.monotonic()
        ended = self.training(self.whole).end()
        self.seconds = time.monotonic() - began
        if ended.code != 0:
            raise RuntimeError(ended.said)

    def training(self, output: Path, resume: bool = False, before=None) -> Training:
        return Training(tiny(self.data, max_steps=STEPS), output, None, resume, before)

    def run(self, number: int, case: Case) -> dict:
        output = self.folder / f"case-{number}"
        shutil.rmtree(output, ignore_errors=True)
        if case.kind == FULL_DISK:
            room = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (int(case.what),) * 2)  # no file grows beyond
            first = self.training(output, before=room).end()
        else:
            training = self.training(output)
            time.sleep(case.what * self.seconds)
            training.send(signal.Signals[case.kind])
            first = training.end()
        resumed = self.training(output, resume=True).end()
        outcome = self.judged(case, output, first, resumed)
        said = next((line for line in first.said.splitlines() if line.startswith(("error:", "stopped"))), "")
        shutil.rmtree(output, ignore_errors=True)
        found = asdict(case) | {"outcome": outcome, "codes": [first.code, resumed.code]}
        if outcome in FAULTS:
            found["log"] = first.said[-3000:] + resumed.said[-3000:]
        return found | {"said": said.replace(str(self.folder), "RUNS")}

    def judged(self, case: Case, output: Path, first: Ended, resumed: Ended) -> str:
        if any(str(ROOT / "fem") in text for end in (first, resumed) for text in end.said.split("Traceback")[1:]):
            return "traceback"
        if case.kind == FULL_DISK and first.code != 0 and "error: " not in first.said:
            return "silent"
        if resumed.code != 0 or not (output / "results.json").exists():
            return "lost"
        found, wanted = weights(output, STEPS), weights(self.whole, STEPS)
        return "same" if all(torch.equal(found[name], wanted[name]) for name in wanted) else "lost"


def table(found: list[dict]) -> list[dict]:
    rows = []
    for kind in dict.fromkeys(case["kind"] for case in found):
        counted = Counter(case["outcome"] for case in found if case["kind"] == kind)
        row = {"what happened": kind, "cases": counted.total(), "same weights": counted["same"]}
        rows.append(row | {name: counted[name] for name in FAULTS})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "research" / "results" / "checks")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "chaos")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    every, chaos = cases(given.seed), Chaos(given.work, given.seed)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = list(pool.map(chaos.run, range(len(every)), every))
    page(found, given.output, given.seed)
    faults = [case for case in found if case["outcome"] in FAULTS]
    for case in faults:
        print(json.dumps(case, indent=2))
    sys.exit(f"{len(faults)} faults" if faults else 0)


def page(found: list[dict], output: Path, seed: int) -> None:
    from fem.provenance import hardware, now, provenance, versions, write_json
    from fem.tables import markdown_table

    data = {"seed": seed, "cases": found, "versions": versions(), "hardware": hardware(), "date": now()}
    write_json(output / "chaos.json", data)
    told = {case["kind"]: case["said"] for case in found if case["said"]}
    text = PAGE.format(
        count=len(found),
        same=sum(row["same weights"] for row in table(found)),
        table=markdown_table(table(found)),
        sentences="\n".join(f"* {kind}: `{said}`" for kind, said in told.items()),
        made=provenance(f"make chaos (seed {seed})"),
    )
    (output / "chaos.md").write_text(text, encoding="utf-8")


PAGE = """# Killed and stopped trainings

{same} of {count} ended with the weights of the run that nothing happened to.

{count} trainings of a tiny model (12 steps, a checkpoint every 5) that were killed or asked to stop at random moments,
or ran out of disk; then `--resume auto`. "Same weights": at the end, those of the undisturbed run, bit for bit.
"Silent": a full disk without a sentence. "Lost": other weights, or a run that cannot go on. "Full disk" is a limit
on the size of files.

{table}
What the user reads, one of each:

{sentences}

{made}"""


if __name__ == "__main__":
    main()
