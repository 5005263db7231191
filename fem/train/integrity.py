"""Folders with one writer, whose files can be checked: a folder is named once all is on disk, with its digests."""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from fem.provenance import sync, write_json

MANIFEST = "complete.json"
LOCK = ".lock"


def digest(path: Path) -> str:
    """BLAKE2b of a file's bytes, 128 bits in hexadecimal."""
    hasher = hashlib.blake2b(digest_size=16)
    with open(path, "rb") as file:
        while part := file.read(1 << 20):
            hasher.update(part)
    return hasher.hexdigest()


def publish(staging: Path, target: Path) -> None:
    """Turn `staging` into the folder `target`: flush its files to disk, list their digests, then rename it."""
    files = sorted(path for path in staging.rglob("*") if path.is_file() and path.name != MANIFEST)
    listed = {}
    for path in files:
        sync(path)
        name = path.relative_to(staging).as_posix()
        listed[name] = {"bytes": path.stat().st_size, "blake2b": digest(path)}
    write_json(staging / MANIFEST, listed)
    for folder in {path.parent for path in files} | {staging}:
        sync(folder)
    if target.exists():
        shutil.rmtree(target)
    os.replace(staging, target)
    sync(target.parent)


def damage(folder: Path, files: str = "*") -> str | None:
    """The fault of a published folder, such as "model.safetensors has other bytes than were saved", or None.

    files: a pattern of the names to check.
    """
    try:
        listed = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        for name in fnmatch.filter(listed, files):
            path, size = folder / name, listed[name]["bytes"]
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != size:
                return f"{name} has {path.stat().st_size} bytes instead of {size}"
            if digest(path) != listed[name]["blake2b"]:
                return f"{name} has other bytes than were saved"
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} cannot be read"
    return None


@contextmanager
def one_writer(folder: Path) -> Iterator[None]:
    """Hold the lock on `folder`, which the system releases when its process ends, however it ends.

    Raises ValueError where another process holds it.
    """
    try:
        with FileLock(folder / LOCK, timeout=0):
            yield
    except Timeout:
        raise ValueError(
            f"another training writes to {str(folder)!r}; wait for it, or choose another output."
        ) from None
