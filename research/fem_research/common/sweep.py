"""Many runs on all cores or GPUs, with a file for each that has finished, so that a stopped sweep resumes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from itertools import cycle
from pathlib import Path
from typing import Any

import torch

from fem_research.common.grid import Job, keep, place_of

RUNS_PER_GPU = 4

Train = Callable[[Any, torch.device, Path], dict[str, Any]]


def sweep(jobs: Sequence[Job], folder: Path, train: Train, workers: int | None = None) -> Iterator[dict]:
    """Run the jobs, each in a process of one thread; yields each record when its job ends, after writing it to
    `folder`.

    train(job, device, place) returns {"curve", "parameters", "seconds"} and may keep checkpoints in the folder `place`;
    other processes must be able to import it. workers: jobs at a time; None: one per core, or four per GPU.
    """
    if not jobs:
        return
    devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())] or ["cpu"]
    cores = os.cpu_count() or 1
    workers = workers or (min(cores, RUNS_PER_GPU * len(devices)) if devices != ["cpu"] else cores)
    context = multiprocessing.get_context("spawn")
    others = multiprocessing.active_children()
    with ProcessPoolExecutor(min(workers, len(jobs)), context, initializer=_start_worker) as pool:
        try:
            turns = zip(jobs, cycle(devices))
            for ended in as_completed([pool.submit(_run, train, job, device, folder) for job, device in turns]):
                yield ended.result()
        except BaseException as error:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                if process not in others:
                    process.terminate()
            if isinstance(error, BrokenProcessPool):
                raise ChildProcessError(
                    "the process of a training was killed, as the system does where memory runs out; the same command "
                    "goes on, with less memory where --workers is smaller."
                ) from error
            raise


def _run(train: Train, job: Job, device: str, folder: Path) -> dict:
    with place_of(job, folder) as checkpoints:
        record = {"job": asdict(job), **train(job, torch.device(device), checkpoints)}
        keep(job, folder, record | {"device": device})
    return record


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends its workers
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A worker ends when its parent does, even where the parent is killed."""
    multiprocessing.parent_process().join()
    os._exit(1)
