"""Many runs: on all cores or GPUs, one file per finished run, so that a stopped sweep goes on where it was."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch

from fem.experiments.common.run import hardware, now, versions, write_json

RUNS_PER_GPU = 4


@runtime_checkable
class Job(Protocol):
    """A dataclass that decides everything that a run finds; `key` is a file name of its own for every job."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def key(self) -> str: ...


Train = Callable[[Any, torch.device], tuple[list[dict], int]]


def finished(jobs: Iterable[Job], folder: Path) -> dict[str, dict]:
    """The records of those jobs that have run, by `Job.key`. A file that is no whole record counts as not run."""
    records = {}
    for job in jobs:
        try:
            record = json.loads((folder / f"{job.key}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if record.get("job") == asdict(job):
            records[job.key] = record
    return records


def sweep(jobs: Sequence[Job], folder: Path, train: Train, workers: int | None = None) -> Iterator[dict]:
    """Run the jobs, each in a process of one thread; yields a record as each ends: job, curve, parameters, seconds.

    train(job, device): the curve that a run measured and the size of its model; a function of a module, or a
    `functools.partial` of one, so that other processes can import it.

    Every record is written to `folder` at once, whole or not at all. workers: None for one per core, or four per GPU.
    """
    if workers is not None and workers < 1:
        raise ValueError(f"workers must be positive, got {workers}.")
    if not jobs:
        return
    folder.mkdir(parents=True, exist_ok=True)
    devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())] or ["cpu"]
    cores = os.cpu_count() or 1
    workers = workers or (min(cores, RUNS_PER_GPU * len(devices)) if devices != ["cpu"] else cores)
    context = multiprocessing.get_context("spawn")
    others = multiprocessing.active_children()
    with ProcessPoolExecutor(min(workers, len(jobs)), context, initializer=_start_worker) as pool:
        try:
            under_way = [
                pool.submit(_run, train, job, devices[index % len(devices)], folder) for index, job in enumerate(jobs)
            ]
            for ended in as_completed(under_way):
                yield ended.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                if process not in others:
                    process.terminate()
            raise


def _run(train: Train, job: Job, device: str, folder: Path) -> dict:
    began = perf_counter()
    curve, parameters = train(job, torch.device(device))
    record = {"job": asdict(job), "curve": curve, "parameters": parameters, "seconds": perf_counter() - began}
    write_json(
        folder / f"{job.key}.json",
        record | {"device": device, "versions": versions(), "hardware": hardware(), "date": now()},
    )
    return record


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends its workers
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A parent that is killed takes its workers along."""
    multiprocessing.parent_process().join()
    os._exit(1)
