"""Messages between the processes of a training, apart from the model's own, and the end of these processes."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from fem.provenance import first_line

Found = TypeVar("Found")
PATIENCE = timedelta(days=7)
GO_ON = 75  # EX_TEMPFAIL of sysexits.h: not finished, the same command resumes
COMMUNICATION = ("gloo", "NCCL", "ProcessGroup", "onnection", "imed out", "peer", "ollective")


class Paused(Exception):
    """The training has stopped early and saved a checkpoint. code: the exit status of the process."""

    def __init__(self, sentence: str, code: int = GO_ON):
        super().__init__(sentence)
        self.code = code


class Lost(Exception):
    """A process no longer answers: it hangs or has ended."""


def lost_touch(error: BaseException) -> bool:
    """Whether an operation failed because another process did not answer."""
    return isinstance(error, RuntimeError) and any(word in str(error) for word in COMMUNICATION)


class Ranks:
    """The processes of a training, which talk over gloo, so that no call here waits for a GPU.

    With one process all calls return at once. With several, create it on every rank, after the default process group.
    """

    def __init__(self, seconds: int = 300):
        several = dist.is_available() and dist.is_initialized()
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if several else (0, 1)
        if self.world > 1:
            self.patient = dist.new_group(backend="gloo", timeout=PATIENCE)
            self.prompt = dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds))
            # The model's own group: on CPUs transformers begins it without `ddp_timeout`, with half an hour.
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds))

    def first(self, work: Callable[[], Found]) -> Found:
        """Call `work` on rank 0 and return its result on every rank, however long it takes.

        Where it raises, rank 0 raises the same, and the others exit with status 2 and print nothing: the error is
        reported once.
        """
        if self.world == 1:
            return work()
        told: list = [None]
        failed: Exception | None = None
        if self.rank == 0:
            try:
                told = [(True, work())]
            except Exception as error:
                told, failed = [(False, None)], error
        dist.broadcast_object_list(told, src=0, group=self.patient)
        if failed is not None:
            raise failed
        done, result = told[0]
        if not done:
            raise SystemExit(2)
        return result

    def each(self, work: Callable[[], None]) -> None:
        """Call `work` on every rank, however long it takes. Where it raises on any, rank 0 raises the first error, and
        the others exit with its status and print nothing."""
        if self.world == 1:
            work()
            return
        told: list = [None] * self.world
        failed: Exception | None = None
        try:
            work()
        except Exception as error:
            failed = error if isinstance(error, (Paused, ValueError, OSError)) else ValueError(repr(error))
        dist.all_gather_object(told, failed, group=self.patient)
        errors = [error for error in told if error is not None]
        if errors and self.rank == 0:
            raise failed or errors[0]
        if errors:
            raise SystemExit(getattr(errors[0], "code", 2))

    def largest(self, value: int) -> int:
        """The largest value that any rank gives."""
        if self.world == 1:
            return value
        shared = torch.tensor(value)
        dist.all_reduce(shared, dist.ReduceOp.MAX, group=self.prompt)
        return int(shared)


@contextmanager
def in_touch() -> Iterator[None]:
    """In this block, an operation that fails because another process does not answer raises `Lost`."""
    try:
        yield
    except RuntimeError as error:
        if not lost_touch(error):
            raise
        raise Lost(f"the processes of the training have lost touch: {first_line(error)}") from None


def first_to_say() -> bool:
    """Whether this process is to print an error: of torchrun's processes, the first that asks torchrun's store."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return True
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    return store.add(f"fem/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/error", 1) == 1


def end_with_parent() -> None:
    """Under torchrun: end this process when the agent that started it is gone, even where the agent was killed."""
    agent = os.getppid()

    def watch() -> None:
        while os.getppid() == agent:
            time.sleep(0.2)
        os._exit(1)

    if "TORCHELASTIC_RUN_ID" in os.environ:
        threading.Thread(target=watch, daemon=True).start()


def end_process_group() -> None:
    """Destroy the process group that a Trainer created, if any. Call it when no reference to the Trainer is left.

    gloo's threads need the GIL to free the tensors of finished operations. The group's destructor holds the GIL while
    it waits for these threads, a deadlock; an exit without the destructor may abort in them. The handle of a barrier
    keeps all operations before it alive: while this function holds it, the threads have nothing to free.
    """
    if not dist.is_initialized():
        return
    gc.collect()
    last = dist.barrier(async_op=True)
    last.wait()
    dist.destroy_process_group()
