"""Trainings that are killed, stopped, starved of disk and damaged, then go on: what became of each.

    python tests/support/chaos.py [--output FOLDER] [--seed N]

writes chaos.md and chaos.json. Every case is one of: gone on with the same weights bit for bit ("same"), refused in a
sentence that says what to do ("refused"), or a fault: "silent" (damage that nobody is told of), "traceback", "lost".
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

from trainings import tiny, weights, write_corpus  # noqa: E402

DAMAGES = ("truncated", "zeroed", "flipped", "deleted")
OWN = ("config.json", "metrics.jsonl", "tokens/tokens.bin", "tokens/source.json", "tokenizer/tokenizer.json")
RUN_FILES = tuple(f"../{name}" for name in OWN)
SIGNALS = ("SIGTERM", "SIGUSR1", "SIGHUP", "SIGINT")
FAULTS = ("silent", "traceback", "lost")
STEPS, CUT = 12, 10


@dataclass(frozen=True)
class Case:
    """kind: "SIGKILL", ..., "full disk", "truncated", ...; what: seconds, bytes, or the file that is damaged."""

    kind: str
    processes: int
    what: str | float | int


@dataclass(frozen=True)
class Ended:
    code: int
    said: str


def cases(files: dict[int, list[str]], seconds: dict[int, float], seed: int) -> list[Case]:
    """All cases. files: the checkpoint's, by number of processes; seconds: an undisturbed run."""
    draw = random.Random(seed)
    found = [Case(kind, 1, name) for name in (*files[1], *RUN_FILES) for kind in DAMAGES]
    kinds = (("SIGKILL", {1: 10, 2: 2}), ("SIGTERM", {1: 3, 2: 1}), *((name, {1: 3}) for name in SIGNALS[1:]))
    for kind, counts in (*kinds, ("SIGSTOP", {1: 2})):
        for processes, count in counts.items():
            moments = (draw.uniform(0.2, 1.0) * seconds[processes] for _ in range(count))
            found += [Case(kind, processes, round(moment, 2)) for moment in moments]
    found += [Case("full disk", 1, size) for size in (400, 5_000, 40_000, 150_000, 300_000)]
    found += [Case("SIGSTOP", 2, rank) for rank in (0, 1)]
    found += [Case("full disk", 2, 150_000)]
    found += [Case(draw.choice(DAMAGES), 2, name) for name in draw.sample(files[2], 4)]
    return sorted(found, key=lambda case: case.processes)


def arguments(recipe, output: Path, resume: bool) -> list[str]:
    words = ["train", "--output", str(output), *(["--resume", "auto"] if resume else [])]
    for name, value in asdict(recipe).items():
        if value is not None and not isinstance(value, bool):
            words += [f"--{name.replace('_', '-')}", str(value)]
    return words


class Training:
    """`fem train` in a process of its own: a fork of this one, which has imported everything, or torchrun's."""

    def __init__(self, recipe, output: Path, processes: int = 1, resume: bool = False, room: int | None = None):
        self.log = output.with_name(f"{output.name}-{time.monotonic_ns()}.log")
        words = arguments(recipe, output, resume)
        if processes > 1:
            command = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m", "fem.cli"]
            environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
            with open(self.log, "w") as log:
                limit = None if room is None else (lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (room, room)))
                line = [sys.executable, "-m", *command, *words]
                self.torchrun = subprocess.Popen(line, env=environment, stdout=log, stderr=log, preexec_fn=limit)
            self.pid = self.torchrun.pid
        else:
            self.torchrun = None
            self.pid = os.fork()
            if self.pid == 0:
                self.become(words, room)

    def become(self, words: list[str], room: int | None) -> None:
        """Train in this process and end with it, whatever happens: it is a fork of whoever called."""
        code = 70
        try:
            log = open(self.log, "w", buffering=1)  # noqa: SIM115  (open until the process ends)
            sys.stdout = sys.stderr = log  # pytest's own would be files that a small room does not hold
            for stream in (1, 2):
                os.dup2(log.fileno(), stream)
            from fem import cli

            if room is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
            torch.set_num_threads(1)
            sys.argv = ["fem", *words]
            cli.main()
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code or 0)

    def ranks(self) -> list[int]:
        """The processes that torchrun started."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        return [int(child) for child in children]

    def end(self, seconds: float = 600.0) -> Ended:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self.torchrun is not None:
                code = self.torchrun.poll()
                if code is not None:
                    return Ended(code, self.log.read_text(errors="replace"))
            else:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    return Ended(os.waitstatus_to_exitcode(status), self.log.read_text(errors="replace"))
            time.sleep(0.05)
        for pid in [*(self.ranks() if self.torchrun is not None else []), self.pid]:
            os.kill(pid, signal.SIGKILL)
        return Ended(-99, self.log.read_text(errors="replace") + "\nFAULT: hung\n")


def damaged(path: Path, how: str, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    if how == "deleted":
        path.unlink()
        return
    if how == "truncated":
        data = data[: len(data) // 2]
    elif how == "zeroed":
        data = bytearray(len(data))
    else:
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def broke(said: str) -> bool:
    """Whether a traceback of ours was printed; torchrun ends with one of its own whatever its processes say."""
    return "FAULT:" in said or ("Traceback" in said and str(ROOT / "fem") in said)


class Chaos:
    """Runs cases against undisturbed trainings of the same recipe."""

    def __init__(self, folder: Path, seed: int, numbers: tuple[int, ...] = (1, 2)):
        self.folder, self.seed = folder, seed
        self.recipe = tiny(write_corpus(folder / "data.jsonl"), max_steps=STEPS)
        self.whole, self.files, self.seconds = {}, {}, {}
        for processes in numbers:
            output = folder / f"whole-{processes}"
            began = time.monotonic()
            ended = Training(self.recipe, output, processes).end()
            if ended.code != 0:
                raise RuntimeError(ended.said)
            self.seconds[processes] = time.monotonic() - began
            self.whole[processes] = weights(output, STEPS)
            newest = output / f"checkpoint-{CUT}"
            self.files[processes] = sorted(
                path.relative_to(newest).as_posix() for path in newest.rglob("*") if path.is_file()
            )

    def stopped(self, case: Case, output: Path) -> None:
        """A copy of the undisturbed run as a kill after its second checkpoint leaves it."""
        shutil.copytree(self.folder / f"whole-{case.processes}", output)
        shutil.rmtree(output / f"checkpoint-{STEPS}")
        (output / "results.json").unlink()

    def run(self, case: Case, number: int) -> dict:
        output = self.folder / f"case-{number}"
        draw = random.Random(f"{self.seed} {number}")
        told = ""
        first = None
        if case.kind in DAMAGES:
            self.stopped(case, output)
            damaged(output / f"checkpoint-{CUT}" / str(case.what), case.kind, draw)
        elif case.kind == "full disk":
            first = Training(self.recipe, output, case.processes, room=int(case.what)).end()
        elif case.kind == "SIGSTOP" and case.processes == 1:
            first, told = self.halted(output, float(case.what))
        elif case.kind == "SIGSTOP":
            first = self.hung(output, int(case.what))
        else:
            training = Training(self.recipe, output, case.processes)
            time.sleep(float(case.what))
            os.kill(training.pid, signal.Signals[case.kind])
            first = training.end()
        resumed = Training(self.recipe, output, case.processes, resume=True).end()
        outcome = self.judged(case, output, first, resumed)
        shown = resumed.said.strip().splitlines()
        sentences = [line for line in shown if line.startswith(("note:", "error:"))]
        before = (
            []
            if first is None
            else [line for line in first.said.splitlines() if line.startswith(("error:", "stopped"))]
        )
        told = told or next(iter(before or sentences), "")
        shutil.rmtree(output, ignore_errors=True)
        return {
            **asdict(case),
            "outcome": outcome,
            "codes": [None if first is None else first.code, resumed.code],
            "said": told.replace(str(self.folder), "RUNS"),
            **({"log": (first.said if first else "")[-3000:] + resumed.said[-3000:]} if outcome in FAULTS else {}),
        }

    def halted(self, output: Path, seconds: float) -> tuple[Ended, str]:
        """SIGSTOP, another training into the same folder, SIGCONT."""
        training = Training(self.recipe, output)
        time.sleep(seconds)
        os.kill(training.pid, signal.SIGSTOP)
        other = Training(self.recipe, output, resume=True).end() if (output / ".writer.json").exists() else None
        os.kill(training.pid, signal.SIGCONT)
        ended = training.end()
        if other is None or "another training writes" in other.said:
            return ended, "" if other is None else other.said.strip()
        return Ended(ended.code, ended.said + "\nFAULT: two writers\n"), ""

    def hung(self, output: Path, rank: int) -> Ended:
        """One of two ranks is stopped for good within its steps."""
        training = Training(replace(self.recipe, comm_timeout=10, max_steps=4000, warmup_steps=2), output, 2)
        until = time.monotonic() + 300
        while not (output / "checkpoint-5").exists() and time.monotonic() < until:
            time.sleep(0.05)
        ranks = training.ranks()
        os.kill(ranks[rank], signal.SIGSTOP)
        ended = training.end(300)
        if f"rank {rank} hangs" not in ended.said:
            ended = Ended(ended.code, ended.said + "\nFAULT: nobody is named\n")
        shutil.rmtree(output)
        return ended

    def judged(self, case: Case, output: Path, first: Ended | None, resumed: Ended) -> str:
        for ended in (first, resumed):
            if ended is not None and broke(ended.said):
                return "traceback"
        if resumed.code == 2 and "error: " in resumed.said:
            return "refused" if case.kind in DAMAGES else "lost"
        try:
            found = weights(output, STEPS)
        except OSError:
            return "lost"
        same = all(torch.equal(found[name], wanted) for name, wanted in self.whole[case.processes].items())
        if resumed.code != 0 or not same or not (output / "results.json").exists():
            return "lost"
        if case.kind == "full disk" and "error: " not in first.said and first.code != 0:
            return "silent"
        if case.kind in DAMAGES and "note: " not in resumed.said and not self.harmless(case):
            return "silent"
        return "same"

    def harmless(self, case: Case) -> bool:
        """These are written again from the checkpoint's copies, whatever is left of them."""
        return case.what in ("../metrics.jsonl", "../config.json")


def table(found: list[dict]) -> list[dict]:
    rows = []
    for processes in (1, 2):
        for kind in dict.fromkeys(case["kind"] for case in found):
            counted = Counter(c["outcome"] for c in found if (c["kind"], c["processes"]) == (kind, processes))
            if counted:
                row = {"what happened": kind, "processes": processes, "cases": counted.total()}
                names = {"same": "same weights", "refused": "refused in a sentence"} | {name: name for name in FAULTS}
                rows.append(row | {shown: counted[name] for name, shown in names.items()})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "results")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    from fem.experiments.common.run import hardware, now, provenance, versions, write_json
    from fem.experiments.common.tables import markdown_table
    from fem.experiments.lm import train, training  # noqa: F401  so that forks have them

    with tempfile.TemporaryDirectory() as folder:
        chaos = Chaos(Path(folder), given.seed)
        every = cases(chaos.files, chaos.seconds, given.seed)
        found = []
        with ProcessPoolExecutor(os.cpu_count(), get_context("fork")) as pool:
            for case in pool.map(chaos.run, every, range(len(every))):
                found.append(case)
                print(json.dumps({name: value for name, value in case.items() if name != "log"}), flush=True)
                print(case.get("log", ""), end="", flush=True)
    rows = table(found)
    data = {"seed": given.seed, "cases": found, "versions": versions(), "hardware": hardware(), "date": now()}
    write_json(given.output / "chaos.json", data)
    page = PAGE.format(
        count=len(found),
        table=markdown_table(rows),
        sentences="\n".join(f"* {said}" for said in dict.fromkeys(examples(found))),
        made=provenance(f"make chaos (seed {given.seed})"),
    )
    (given.output / "chaos.md").write_text(page, encoding="utf-8")
    faults = [case for case in found if case["outcome"] in FAULTS]
    sys.exit(f"{len(faults)} faults" if faults else 0)


def examples(found: list[dict]):
    """One sentence of every kind."""
    for kind in dict.fromkeys(case["kind"] for case in found):
        said = next((case["said"] for case in found if case["kind"] == kind and case["said"]), None)
        if said:
            yield f"{kind}: `{said}`"


PAGE = """# Killed, stopped and damaged trainings

{count} trainings of a tiny model (12 steps, a checkpoint every 5) that were killed or asked to stop at random moments,
ran out of disk, or found one file of their newest checkpoint, or of their folder, damaged; then `--resume auto`. "Same
weights": the weights at the end are those of the undisturbed run, bit for bit. "Silent": damage without a sentence.
"Lost": other weights, or a run that cannot go on. "Full disk" is a limit on the size of files.

{table}
What the user reads, one of each:

{sentences}

{made}"""


if __name__ == "__main__":
    main()
