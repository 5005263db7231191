"""The trainings of an experiment, each with a record in a file of its own: one that has ended is not run again."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

from fem.runs.run import circumstances, note, read_json, write_json
from fem.train.lock import one_writer


@runtime_checkable
class Job(Protocol):
    """A dataclass of everything that decides a result; `key` is a file name of its own for every job."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def key(self) -> str: ...


def digest_of(decides: Any, data: bytes = b"") -> str:
    """Twelve hexadecimal digits for a file's name, which other values or other data would change."""
    found = hashlib.blake2b(json.dumps(decides, sort_keys=True).encode(), digest_size=6)
    found.update(data)
    return found.hexdigest()


def record_of(job: Job, folder: Path) -> dict | None:
    """The record of a job that has run; None where there is none, and where it is damaged, which a note says.

    A record that names its job counts for this job alone.
    """
    path = folder / f"{job.key}.json"
    if not path.exists():
        return None
    found = read_json(path)
    if isinstance(found, dict):
        return found if "job" not in found or found["job"] == asdict(job) else None
    note(f"{path.name} is damaged; its training runs again.")
    return None


@contextmanager
def place_of(job: Job, folder: Path) -> Iterator[Path]:
    """A folder for the job's checkpoints, `folder`/KEY, locked for one writer; once the block has ended, it is removed.

    A block that fails leaves it: the next one goes on from there.
    """
    place = folder / job.key
    place.mkdir(parents=True, exist_ok=True)
    with one_writer(place):
        yield place
    shutil.rmtree(place, ignore_errors=True)


def keep(job: Job, folder: Path, record: dict) -> None:
    """Write the record of a job that has run to `folder`, with where and when it ran."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / f"{job.key}.json", record | circumstances())
