"""What stands beside every measurement: card, driver, versions, date."""

from __future__ import annotations

import subprocess

from fem.extras import installed
from fem.provenance import circumstances


def circumstances_of_card() -> dict:
    """Versions, hardware, driver and date."""
    facts = circumstances()
    facts["versions"] |= {name: installed(name) for name in ("triton", "fla-core", "mamba-ssm", "safetensors")}
    return facts | {"driver": driver()}


def driver() -> str | None:
    """The version of the card's driver, as nvidia-smi says it; None where there is none."""
    try:
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(asked, capture_output=True, text=True, timeout=30, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return None
