"""Trainings that are killed, stopped, run out of disk or are damaged, and then resumed: the outcome of each.

    python tests/support/chaos.py [--output FOLDER] [--seed N] [--work FOLDER]

writes chaos.md and chaos.json. Every case is one of: resumed with the same weights bit for bit ("same"), refused with a
sentence that says what to do ("refused"), or a fault: "silent" (damage that is not reported), "traceback", "lost".
Finished cases are kept in the work folder: a call that was stopped resumes after them.
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
from filelock import FileLock, Timeout

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

from forked import Ended, Training, ready  # noqa: E402
from trainings import tiny, weights, write_corpus  # noqa: E402

DAMAGES = ("truncated", "zeroed", "flipped", "deleted")
OWN = ("config.json", "metrics.jsonl", "tokens/tokens.bin", "tokens/source.json", "tokenizer/tokenizer.json")
RUN_FILES = tuple(f"../{name}" for name in OWN)
SIGNALS = ("SIGUSR1", "SIGHUP", "SIGINT")
FAULTS = ("silent", "traceback", "lost")
STEPS, CUT = 12, 10
ONE, TWO = "1", "2"
WAYS = {ONE: None, TWO: 2}  # processes, None without torchrun


@dataclass(frozen=True)
class Case:
    """kind: "SIGKILL", ..., "full disk", "truncated", ...; what: seconds, bytes, or the file that is damaged."""

    kind: str
    processes: str
    what: str | float | int


def cases(files: dict[str, list[str]], seconds: dict[str, float], seed: int) -> list[Case]:
    """All cases. files: the checkpoint's, by processes; seconds: an undisturbed run."""
    draw = random.Random(seed)
    found = [Case(kind, ONE, name) for name in (*files[ONE], *RUN_FILES) for kind in DAMAGES]
    counts = {"SIGKILL": {ONE: 10, TWO: 4}, "SIGTERM": {ONE: 3, TWO: 3}, "SIGSTOP": {ONE: 2}}
    for kind in (*SIGNALS, *counts):
        for processes, count in counts.get(kind, {ONE: 3}).items():
            moments = (draw.uniform(0.2, 1.0) * seconds[processes] for _ in range(count))
            found += [Case(kind, processes, round(moment, 2)) for moment in moments]
    rooms = {ONE: (400, 5_000, 40_000, 150_000, 300_000), TWO: (5_000, 40_000, 150_000, 300_000)}
    found += [Case("full disk", processes, room) for processes in rooms for room in rooms[processes]]
    found += [Case("SIGSTOP", TWO, rank) for rank in (0, 1)]
    return found + [Case(draw.choice(DAMAGES), TWO, name) for name in draw.sample(files[TWO], 6)]


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
    """Whether a traceback of ours was printed; torchrun ends with one of its own whatever its processes say.

    A forked process has torchrun's handler until `fem` has set its own: its SignalException is no fault of ours.
    """
    ours = (text for text in said.split("Traceback")[1:] if str(ROOT / "fem") in text)
    return "FAULT:" in said or any("SignalException" not in text for text in ours)


def errors(said: str) -> list[str]:
    return [line for line in said.splitlines() if line.startswith("error: ")]


def little_room(size: int) -> None:
    """As on a full disk: no file may grow beyond so many bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def stop_for_good(rank: int) -> None:
    """This rank stops in the middle of its seventh step, as a process does that the machine does not let go on."""
    from fem.train.trainer import TextTrainer

    original = TextTrainer.training_step

    def stopping(self, *args, **given):
        if self.state.global_step == 6 and self.args.process_index == rank:
            os.kill(os.getpid(), signal.SIGSTOP)
        return original(self, *args, **given)

    TextTrainer.training_step = stopping


class Chaos:
    """Runs cases against undisturbed trainings of the same recipe, which are made once in `folder`."""

    def __init__(self, folder: Path, seed: int, ways: tuple[str, ...] = tuple(WAYS)):
        self.folder, self.seed = folder, seed
        self.data = folder / "data.jsonl"
        if not self.data.exists():
            write_corpus(self.data)
        self.whole, self.files, self.seconds = {}, {}, {}
        ready()
        for number, processes in enumerate(ways):
            output, clock = folder / f"whole-{number}", folder / f"seconds-{number}.json"
            if not clock.exists():
                shutil.rmtree(output, ignore_errors=True)
                began = time.monotonic()
                ended = self.training(processes, output).end()
                if ended.code != 0:
                    raise RuntimeError(ended.said)
                clock.write_text(json.dumps(time.monotonic() - began))
            self.seconds[processes] = json.loads(clock.read_text())
            self.whole[processes] = output
            newest = output / f"checkpoint-{CUT}"
            self.files[processes] = sorted(
                path.relative_to(newest).as_posix() for path in newest.rglob("*") if path.is_file()
            )

    def training(self, processes: str, output: Path, *, resume: bool = False, before=None, **changes) -> Training:
        recipe = tiny(self.data, max_steps=STEPS, **changes)
        return Training(recipe, output, WAYS[processes], resume, before)

    def run(self, case: Case, number: int) -> dict:
        output = self.folder / f"case-{number}"
        shutil.rmtree(output, ignore_errors=True)
        began = time.monotonic()
        first, told = self.disturbed(case, output, random.Random(f"{self.seed} {number}"))
        resumed = self.training(case.processes, output, resume=True).end()
        outcome = self.judged(case, output, first, resumed)
        lines = resumed.said.strip().splitlines() if first is None else first.said.splitlines()
        told = told or next((line for line in lines if line.startswith(("note:", "error:", "stopped"))), "")
        shutil.rmtree(output, ignore_errors=True)
        return {
            **asdict(case),
            "outcome": outcome,
            "codes": [None if first is None else first.code, resumed.code],
            "said": told.replace(str(self.folder), "RUNS"),
            "seconds": round(time.monotonic() - began, 1),
            **({"log": (first.said if first else "")[-3000:] + resumed.said[-3000:]} if outcome in FAULTS else {}),
        }

    def disturbed(self, case: Case, output: Path, draw: random.Random) -> tuple[Ended | None, str]:
        """What the disturbed training said, None where files of a stopped one are damaged, and the sentence to show."""
        start = partial(self.training, case.processes, output)
        if case.kind in DAMAGES:
            self.stopped(case, output)
            damaged(output / f"checkpoint-{CUT}" / str(case.what), case.kind, draw)
            return None, ""
        if case.kind == "full disk":
            return start(before=partial(little_room, int(case.what))).end(), ""
        if case.kind == "SIGSTOP" and case.processes == ONE:
            return self.halted(start(), output, float(case.what))
        if case.kind == "SIGSTOP":
            return self.hung(start(comm_timeout=10, before=partial(stop_for_good, case.what)), case.what), ""
        training = start()
        time.sleep(float(case.what))
        training.send(signal.Signals[case.kind])
        ended = training.end()
        if (output / ".lock").exists():
            try:
                FileLock(output / ".lock").acquire(timeout=60).lock.release()  # ranks end a moment after their agent
            except Timeout:
                return Ended(ended.code, ended.said + "\nFAULT: orphans\n"), ""
        return ended, ""

    def stopped(self, case: Case, output: Path) -> None:
        """A copy of the undisturbed run as a kill after its second checkpoint leaves it."""
        shutil.copytree(self.whole[case.processes], output)
        shutil.rmtree(output / f"checkpoint-{STEPS}")
        (output / "results.json").unlink()

    def halted(self, training: Training, output: Path, seconds: float) -> tuple[Ended, str]:
        """SIGSTOP, another training into the same folder, SIGCONT."""
        time.sleep(seconds)
        training.send(signal.SIGSTOP)
        other = self.training(ONE, output, resume=True).end() if (output / ".lock").exists() else None
        training.send(signal.SIGCONT)
        ended = training.end()
        if other is None or "another training writes" in other.said:
            return ended, "" if other is None else other.said.strip()
        if "is finished" in other.said:  # the first had let go of the folder before it was stopped: one writer
            return ended, ""
        return Ended(ended.code, ended.said + "\nFAULT: two writers\n"), ""

    def hung(self, training: Training, rank: int) -> Ended:
        """One of two ranks stops for good in a step; torchrun takes half a minute to end it."""
        ended = training.end(180)
        if "lost touch" not in ended.said:
            return Ended(ended.code, ended.said + "\nFAULT: nobody says that a process hangs\n")
        return ended

    def judged(self, case: Case, output: Path, first: Ended | None, resumed: Ended) -> str:
        for ended in (first, resumed):
            if ended is not None and (broke(ended.said) or len(errors(ended.said)) > 1):
                return "traceback"
        if resumed.code == 2 and errors(resumed.said):
            return "refused" if case.kind in DAMAGES else "lost"
        try:
            found = weights(output, STEPS)
        except OSError:
            return "lost"
        wanted = weights(self.whole[case.processes], STEPS)
        same = all(torch.equal(found[name], wanted[name]) for name in wanted)
        if resumed.code != 0 or not same or not (output / "results.json").exists():
            return "lost"
        if case.kind == "full disk" and first.code != 0 and not errors(first.said):
            return "silent"
        if case.kind in DAMAGES and "note: " not in resumed.said and not self.harmless(case):
            return "silent"
        return "same"

    def harmless(self, case: Case) -> bool:
        """These are written again from the checkpoint's copies, whatever is left of them."""
        return case.what in ("../metrics.jsonl", "../config.json")


def table(found: list[dict]) -> list[dict]:
    rows = []
    for processes in WAYS:
        for kind in dict.fromkeys(case["kind"] for case in found):
            counted = Counter(c["outcome"] for c in found if (c["kind"], c["processes"]) == (kind, processes))
            if counted:
                row = {"what happened": kind, "processes": processes, "cases": counted.total()}
                names = {"same": "same weights", "refused": "refused in a sentence"} | {name: name for name in FAULTS}
                rows.append(row | {shown: counted[name] for name, shown in names.items()})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "research" / "results" / "checks")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "chaos")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    work = given.work / f"seed-{given.seed}"
    work.mkdir(parents=True, exist_ok=True)
    chaos = Chaos(work, given.seed)
    every = cases(chaos.files, chaos.seconds, given.seed)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = list(pool.map(partial(once, chaos), every, range(len(every))))
    page(found, given.output, given.seed)
    faults = [case for case in found if case["outcome"] in FAULTS]
    sys.exit(f"{len(faults)} faults" if faults else 0)


def once(chaos: Chaos, case: Case, number: int) -> dict:
    """The case's record in the work folder, or the case itself, which is said."""
    record = chaos.folder / f"case-{number}.json"
    if record.exists():
        found = json.loads(record.read_text())
        if Case(found["kind"], found["processes"], found["what"]) == case:
            return found
    found = chaos.run(case, number)
    print(json.dumps({name: value for name, value in found.items() if name != "log"}), flush=True)
    print(found.get("log", ""), end="", flush=True)
    record.write_text(json.dumps(found))
    return found


def page(found: list[dict], output: Path, seed: int) -> None:
    from fem.provenance import hardware, now, provenance, versions, write_json
    from fem.tables import markdown_table

    data = {"seed": seed, "cases": found, "versions": versions(), "hardware": hardware(), "date": now()}
    write_json(output / "chaos.json", data)
    text = PAGE.format(
        count=len(found),
        same=sum(row["same weights"] for row in table(found)),
        table=markdown_table(table(found)),
        sentences="\n".join(f"* {said}" for said in dict.fromkeys(examples(found))),
        made=provenance(f"make chaos (seed {seed})"),
    )
    (output / "chaos.md").write_text(text, encoding="utf-8")


def examples(found: list[dict]):
    """One sentence of every kind."""
    for kind in dict.fromkeys(case["kind"] for case in found):
        said = next((case["said"] for case in found if case["kind"] == kind and case["said"]), None)
        if said:
            yield f"{kind}: `{said}`"


PAGE = """# Killed, stopped and damaged trainings

{same} of {count} ended with the weights of the run that nothing happened to.

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
