"""One writer per folder: a lock that the system releases when its process ends, and a file that says who holds it."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from fem.runs.run import note, write_json

LOCK, HOLDER = ".lock", ".writer.json"


@contextmanager
def one_writer(folder: Path) -> Iterator[None]:
    """Hold the lock on `folder`. Raises ValueError where another process holds it, with its host, number and age.

    The system releases the lock when its process ends, even where it is killed: files left behind are no obstacle.
    """
    lock = FileLock(folder / LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise ValueError(
            f"another training writes to {str(folder)!r}{_holder(folder)}; wait for it, or choose another output."
        ) from None
    try:
        if (folder / HOLDER).exists():
            note(f"an earlier training in {str(folder)!r}{_holder(folder)} ended without a word; its lock is free.")
        me = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.time()}
        write_json(folder / HOLDER, me)
        yield
    finally:
        (folder / HOLDER).unlink(missing_ok=True)
        lock.release()


def _holder(folder: Path) -> str:
    try:
        who = json.loads((folder / HOLDER).read_text(encoding="utf-8"))
        minutes = (time.time() - who["since"]) / 60
        return f" (process {who['pid']} on {who['host']}, begun {minutes:.0f} minutes ago)"
    except (OSError, ValueError, KeyError, TypeError):
        return ""
