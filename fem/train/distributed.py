"""How the processes of a training talk to one another, apart from the model's own messages, and how they end."""

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

from fem.runs.run import first_line

Found = TypeVar("Found")
PATIENCE = timedelta(days=7)
ROLL_CALL = 5.0  # seconds in which ranks that still run say so
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
        self.seconds = seconds
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
        done, found = told[0]
        if not done:
            raise SystemExit(2)
        return found

    def largest(self, value: int) -> int:
        """The largest value that any rank gives."""
        if self.world == 1:
            return value
        shared = torch.tensor(value)
        dist.all_reduce(shared, dist.ReduceOp.MAX, group=self.prompt)
        return int(shared)

    @contextmanager
    def in_touch(self) -> Iterator[None]:
        """In this block, only one process reports an error, and an operation that fails because another process does
        not answer raises `Lost`, which names that process. Processes that report nothing exit with status 2."""
        try:
            yield
        except Exception as error:
            if self.world == 1:
                raise
            lost = lost_touch(error)
            missing = self.missing() if lost else []
            if torchrun_store().add(f"{store_key()}/said", 1) > 1:
                raise SystemExit(2) from None
            if missing:
                names = ", ".join(f"rank {rank}" for rank in missing)
                told = f"{names} hangs or has ended: no answer within {self.seconds} s (--comm-timeout)"
                raise Lost(told) from None
            if lost:
                raise Lost(f"the processes have lost touch: {first_line(error)}") from None
            raise

    def missing(self) -> list[int]:
        """The ranks that do not answer a roll call within seconds."""
        store = torchrun_store()
        here = [f"{store_key()}/rank{rank}" for rank in range(self.world)]
        store.set(here[self.rank], "here")
        until = time.monotonic() + ROLL_CALL
        while time.monotonic() < until and not store.check(here):
            time.sleep(0.1)
        return [rank for rank, key in enumerate(here) if not store.check([key])]


def store_key() -> str:
    """The prefix of all keys in the store; it changes when torchrun restarts the processes."""
    return f"fem/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"


def torchrun_store() -> dist.TCPStore:
    """torchrun's key-value store, which works without any process group."""
    return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)


@contextmanager
def joining() -> Iterator[None]:
    """In this block, processes that cannot connect to one another raise `Lost`, with one sentence."""
    try:
        yield
    except RuntimeError as error:
        if "RANK" not in os.environ:
            raise
        raise Lost(f"the processes of the training did not find one another: {first_line(error)}") from None


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
