"""The trainings of an experiment, each with a record in a file of its own: what has ended is not run again."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from fem.experiments.common.run import note


def digest_of(decides: Any, data: bytes = b"") -> str:
    """Twelve digits for a file's name: other values or other data, other name."""
    found = hashlib.blake2b(json.dumps(decides, sort_keys=True).encode(), digest_size=6)
    found.update(data)
    return found.hexdigest()


def read_record(path: Path) -> dict | None:
    """The record of a training that has ended, None where there is none; one that is damaged counts as none."""
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return found
    except (OSError, ValueError):
        pass
    note(f"{path.name} is damaged; its training runs again.")
    return None
