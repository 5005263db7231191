"""Pages of results for the scripts beside this file, which measure with `fem_research.common.measure`."""

from __future__ import annotations

import json
import platform
import time
from pathlib import Path

import torch

from fem.provenance import processor
from fem.tables import markdown_table


def environment() -> dict[str, str]:
    return {
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "processor": f"{processor()}, {torch.backends.cpu.get_cpu_capability()}",
        "threads": str(torch.get_num_threads()),
    }


def save(path: str, title: str, results: object, rows: list[dict[str, str]], note: str) -> None:
    """Write `path`.json with everything measured, and `path`.md with `rows` as a table."""
    facts = environment()
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(f"{path}.json", "w") as file:
        json.dump({"environment": facts, "results": results}, file, indent=1)
    stamp = ", ".join(f"{name} {value}" for name, value in facts.items())
    with open(f"{path}.md", "w") as file:
        file.write(f"# {title}\n\n{note}\n\n{markdown_table(rows)}\n{stamp}.\n")
    print(markdown_table(rows))
