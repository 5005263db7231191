"""One writer per folder: a lock that the system releases when its process ends, however it ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

LOCK = ".lock"


@contextmanager
def one_writer(folder: Path) -> Iterator[None]:
    """Hold the lock on `folder`. Raises ValueError where another process holds it."""
    try:
        with FileLock(folder / LOCK, timeout=0):
            yield
    except Timeout:
        raise ValueError(
            f"another training writes to {str(folder)!r}; wait for it, or choose another output."
        ) from None
