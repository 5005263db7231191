"""What the processes of a training tell one another outside of the model, and how they end."""

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

Found = TypeVar("Found")
PATIENCE = timedelta(days=7)
ROLL_CALL = 5.0  # seconds in which ranks that still run say so
GO_ON = 75  # EX_TEMPFAIL of sysexits.h: not done, and the same command may go on
COMMUNICATION = ("gloo", "NCCL", "ProcessGroup", "onnection", "imed out", "peer", "ollective")


class Paused(Exception):
    """The training has stopped before its end and left a checkpoint; `code` is for whoever started it."""

    def __init__(self, sentence: str, code: int = GO_ON):
        super().__init__(sentence)
        self.code = code


class Lost(Exception):
    """The processes have lost touch: one hangs or has ended."""


def lost_touch(error: BaseException) -> bool:
    """Whether an operation failed for want of another process."""
    return isinstance(error, RuntimeError) and any(word in str(error) for word in COMMUNICATION)


class Ranks:
    """The processes of a training, over gloo, so that no GPU is waited for.

    One process: everything is immediate. Several: made once the default group is there, on every rank alike.
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
        """What `work` returns on rank 0, on every rank, however long it takes.

        Where it raises, rank 0 raises that and the others end with status 2 and no word: it is said once.
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
        """Within, an error is said by one process alone, and an operation that fails for want of another process
        raises `Lost`, which names that process. Processes that have nothing to say end with status 2."""
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
                raise Lost(f"the processes have lost touch: {str(error).strip().splitlines()[0]}") from None
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
    """What every key of this start of the processes begins with."""
    return f"fem/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"


def torchrun_store() -> dist.TCPStore:
    """torchrun's own store, which needs none of the groups."""
    return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)


@contextmanager
def joining() -> Iterator[None]:
    """Within, processes that do not find one another are one sentence. Raises `Lost`."""
    try:
        yield
    except RuntimeError as error:
        if "RANK" not in os.environ:
            raise
        reason = str(error).strip().splitlines()[0]
        raise Lost(f"the processes of the training did not find one another: {reason}") from None


def end_with_parent() -> None:
    """Under torchrun: end when the agent that started this process is gone, however it went."""
    agent = os.getppid()

    def watch() -> None:
        while os.getppid() == agent:
            time.sleep(0.2)
        os._exit(1)

    if "TORCHELASTIC_RUN_ID" in os.environ:
        threading.Thread(target=watch, daemon=True).start()


def end_process_group() -> None:
    """End the process group that a Trainer began, if there is one. Call it once the Trainer is out of reach.

    gloo's threads free the tensors of the works they did, for which they need Python's lock; the group's destructor
    holds that lock while it waits for the threads, and an exit without it may abort in them. The handle of a barrier
    keeps all works before it: as long as this function has the handle, nothing is left for the threads to free.
    """
    if not dist.is_initialized():
        return
    gc.collect()
    last = dist.barrier(async_op=True)
    last.wait()
    dist.destroy_process_group()
