"""What stands beside every measurement: card, driver, versions, the commit, date."""

from __future__ import annotations

import subprocess
from pathlib import Path

from fem.extras import installed
from fem.provenance import circumstances


def circumstances_of_card() -> dict:
    """Versions, hardware, driver, commit and date."""
    facts = circumstances()
    facts["versions"] |= {name: installed(name) for name in ("triton", "fla-core", "mamba-ssm", "safetensors")}
    return facts | {"driver": driver(), "code": code()}


def driver() -> str | None:
    """The version of the card's driver, as nvidia-smi says it; None where there is none."""
    return _first_word("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


def code() -> str | None:
    """The commit that runs, ending in "-dirty" where files differ from it; None outside a checkout."""
    here = str(Path(__file__).parent)
    return _first_word("git", "-C", here, "describe", "--always", "--dirty", "--abbrev=8", "--exclude=*")


def _first_word(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return None
