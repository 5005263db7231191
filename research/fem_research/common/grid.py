"""Trainings over seeds and learning rates, each with a record in a file: those without one run, in one folder."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

from rich.progress import Progress

from fem.provenance import circumstances, note, read_json, write_json
from fem.tables import Rows, show_table
from fem.train.checkpoints import one_writer
from fem_research.record import EXPERIMENTS
from fem_research.runs.run import open_run
from fem_research.runs.tables import write_table


@runtime_checkable
class Job(Protocol):
    """A dataclass of everything that decides a result; `key` is a file name of its own for every job."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def key(self) -> str: ...


LATER = {
    "mlp": "narrowed",
    "recipe": "plain",
    "stream": False,
}  # fields that earlier records lack, and what their trainings did


def decided(decides: Any) -> Any:
    """The values without those that earlier records lack, where they are what these did."""
    if not isinstance(decides, dict):
        return decides
    return {name: decided(value) for name, value in decides.items() if name not in LATER or value != LATER[name]}


def digest_of(decides: Any, data: bytes = b"") -> str:
    """Twelve hexadecimal digits for a file's name, which other values or other data would change."""
    digest = hashlib.blake2b(json.dumps(decided(decides), sort_keys=True).encode(), digest_size=6)
    digest.update(data)
    return digest.hexdigest()


def smallest(errors: Mapping[float, float]) -> float:
    """The learning rate of the smallest error; a training that diverged has none."""
    return min(errors, key=lambda rate: errors[rate] if math.isfinite(errors[rate]) else math.inf)


def record_of(job: Job, folder: Path) -> dict | None:
    """The record of this very job; None where there is none, and where it is damaged, which a note says."""
    path = folder / f"{job.key}.json"
    if not path.exists():
        return None
    found = read_json(path)
    if isinstance(found, dict) and "curve" in found:
        return found if "job" not in found or decided(found["job"]) == decided(asdict(job)) else None
    note(f"{path.name} is damaged; its training runs again.")
    return None


@contextmanager
def place_of(job: Job, folder: Path) -> Iterator[Path]:
    """A folder for the job's checkpoints, locked for one writer; removed when the block ends, unless it fails."""
    place = folder / job.key
    place.mkdir(parents=True, exist_ok=True)
    with one_writer(place):
        yield place
    shutil.rmtree(place, ignore_errors=True)


def keep(job: Job, folder: Path, record: dict) -> None:
    """Write the record of a job that has run to `folder`, with where and when it ran."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / f"{job.key}.json", record | circumstances())


class Tuned(NamedTuple):
    """Records of a comparison: of every row by learning rate on the first seed, and by seed at its best rate."""

    tuning: dict[str, dict[float, dict]]
    chosen: dict[str, list[dict]]


@dataclass(frozen=True)
class Grid:
    """The records in `folder`; train(jobs, folder) makes those that are missing, told(record) is for the bar."""

    folder: Path
    train: Callable[[list[Job], Path], Iterable[dict]]
    bars: Progress
    title: str
    told: Callable[[dict], str] = lambda record: ""

    def records(self, jobs: Iterable[Job]) -> list[dict]:
        """The record of every job, in their order; the jobs that have none are run."""
        jobs = list(jobs)
        missing = [job for job in jobs if record_of(job, self.folder) is None]
        bar = self.bars.add_task(self.title, total=len(jobs), completed=len(jobs) - len(missing))
        for record in self.train(missing, self.folder):
            self.bars.update(bar, advance=1, description=f"{self.title}{self.told(record)}")
        return [record_of(job, self.folder) for job in jobs]

    def tuned(
        self,
        rows: Sequence[str],
        rates: Sequence[float],
        seeds: Sequence[int],
        job: Callable[[str, float, int], Job],
        error: Callable[[dict], float],
    ) -> Tuned:
        """Every row at every learning rate on the first seed, then at the rate of its smallest error on all seeds.

        job(row, rate, seed) is a training, error(record) what it is judged by.
        """
        found = iter(self.records(job(row, rate, seeds[0]) for row in rows for rate in rates))
        tuning = {row: {rate: next(found) for rate in rates} for row in rows}
        best = {
            row: smallest({rate: error(record) for rate, record in records.items()}) for row, records in tuning.items()
        }
        found = iter(self.records(job(row, best[row], seed) for row in rows for seed in seeds))
        return Tuned(tuning, {row: [next(found) for _ in seeds] for row in rows})


def one_by_one(
    jobs: Iterable[Job], folder: Path, train: Callable[[Any, Path], dict], writes: bool = True
) -> Iterator[dict]:
    """Run the jobs here by train(job, folder of its checkpoints); of torchrun's processes, one `writes`."""
    for job in jobs:
        with place_of(job, folder) if writes else nullcontext(folder / job.key) as place:
            record = train(job, place)
            if writes:
                keep(job, folder, record)
        yield record


def publish(
    output: Path,
    experiment: str,
    recipe: Any,
    records: Iterable[dict],
    names: Sequence[str],
    *,
    tables: Mapping[str, Rows],
    page: Callable[[Path], object],
    results: dict,
    shown: tuple[str, Rows],
    draw: Callable[[Mapping, Path], None] | None = None,
) -> dict:
    """Write a comparison to `output`: metrics.jsonl, tables, page, results.json and pictures; returns the results.

    names: the fields of a record or its job that metrics.jsonl has beside every point of its curve. page(folder) writes
    report.md, which shows scores.png, a dot for every training. shown: the title and the rows of the table for the
    terminal. draw(results, folder): other pictures of the page.
    """
    with open_run(output, experiment, recipe) as under_way:
        for record in records:
            fields = record | record.get("job", {})
            for part in [part for part in fields.values() if isinstance(part, dict)]:
                fields = part | fields
            for point in record["curve"]:
                under_way.log(experiment=experiment, **{name: fields[name] for name in names}, **point)
        for name, rows in tables.items():
            write_table(under_way.folder, name, rows)
        page(under_way.folder)
        results = under_way.finish(results)
        if rows := list(EXPERIMENTS[experiment](asdict(recipe), results)):
            from fem_research.common import pictures  # with matplotlib, which a command's help does without

            pictures.scores(under_way.folder / "scores.png", rows)
        if draw is not None:
            draw(results, under_way.folder)
    show_table(*shown)
    return results
