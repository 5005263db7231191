"""`fem train` in forks of a server that has imported everything, which saves seconds per training."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
import traceback
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields
from multiprocessing import get_context
from pathlib import Path

SERVER = get_context("forkserver")
SERVER.set_forkserver_preload(
    [
        "torch.distributed.launcher.api",
        "torch.utils.tensorboard",
        "transformers.trainer",
        "fem.cli",
        "fem.commands.train",
        "fem.train.train",
    ]
)


def ready() -> None:
    """Wait until the server has imported everything, so that trainings can be timed."""
    process = SERVER.Process(target=time.sleep, args=(0,))
    process.start()
    process.join()


@dataclass(frozen=True)
class Ended:
    code: int
    said: str


def arguments(recipe, output: Path, resume: bool) -> list[str]:
    """The arguments of the command line."""
    from fem.commands.options import called

    words = ["train", "--output", str(output), *(["--resume", "auto"] if resume else [])]
    for part in fields(recipe):
        value = getattr(recipe, part.name)
        if isinstance(value, bool):
            words += [f"--{called(part)}"] if value else []
        elif value is not None:
            words += [f"--{called(part)}", str(value)]
    return words


class Training:
    """One process, or torchrun's agent and its ranks, whose output goes to a file.

    processes: None is one without torchrun. before: called in every rank before it trains, such as to inject a fault.
    """

    def __init__(self, recipe, output: Path, processes: int | None = None, resume: bool = False, before=None):
        self.log = output.with_name(f"{output.name}-{time.monotonic_ns()}.log")
        given = (self.log, arguments(recipe, output, resume), processes, before)
        self.process = SERVER.Process(target=_train, args=given)
        self.process.start()

    @property
    def pid(self) -> int:
        return self.process.pid

    def send(self, number: signal.Signals) -> None:
        """Send a signal, if there still is a process."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def end(self, seconds: float = 600.0) -> Ended:
        """Wait for the end, at most so long: then it is killed."""
        self.process.join(seconds)
        hung = self.process.exitcode is None
        if hung:
            self.process.kill()
            self.process.join()
        said = self.log.read_text(errors="replace") if self.log.exists() else ""
        return Ended(self.process.exitcode, said + ("\nFAULT: hung\n" if hung else ""))


def _train(log: Path, words: list[str], processes: int | None, before: Callable[[], None] | None) -> None:
    gc.freeze()  # a collection would touch, and so copy, all that the server has imported
    with open(log, "a", buffering=1) as file:
        sys.stdout = sys.stderr = file
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
        if processes is None:
            os._exit(_code_of(_command, words, before))
        os._exit(_code_of(_torchrun, processes, words, before))


def _code_of(work: Callable, *given) -> int:
    """The exit status of a process that does this work and no other."""
    import torch

    try:
        torch.set_num_threads(1)
        work(*given)
        return 0
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(bool(ended.code))
    except BaseException:
        traceback.print_exc()
        return 1


def _command(words: list[str], before: Callable[[], None] | None) -> None:
    from fem import cli

    if before is not None:
        before()
    sys.argv = ["fem", *words]
    cli.main()


def _torchrun(processes: int, words: list[str], before: Callable[[], None] | None) -> None:
    """What torchrun --standalone does, with forks of this process instead of fresh ones."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=str(uuid.uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        start_method="fork",
    )
    try:
        elastic_launch(config, _rank)(words, before)
    except (ChildFailedError, SignalException) as ended:
        raise SystemExit(1) from ended


def _rank(words: list[str], before: Callable[[], None] | None) -> None:
    if code := _code_of(_command, words, before):
        os._exit(code)  # the agent waits for what a function returns, and for nothing else
