"""Fresh processes to measure in, and pages of results. Ratios and memory are `fem.experiments.bench.measure`'s."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import time

import torch

from fem.experiments.common.run import processor
from fem.experiments.common.tables import markdown_table


def in_fresh_process(script: str, *arguments: str) -> str:
    """What `python script arguments` prints."""
    return subprocess.run([sys.executable, script, *arguments], check=True, capture_output=True, text=True).stdout


def environment() -> dict[str, str]:
    return {
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "processor": f"{processor()}, {torch.backends.cpu.get_cpu_capability()}",
        "threads": str(torch.get_num_threads()),
    }


def save(path: str, title: str, results: object, rows: list[dict[str, str]], note: str) -> None:
    """`path`.json with everything measured, and `path`.md with the table that a reader wants."""
    facts = environment()
    with open(f"{path}.json", "w") as file:
        json.dump({"environment": facts, "results": results}, file, indent=1)
    stamp = ", ".join(f"{name} {value}" for name, value in facts.items())
    with open(f"{path}.md", "w") as file:
        file.write(f"# {title}\n\n{note}\n\n{markdown_table(rows)}\n{stamp}.\n")
    print(markdown_table(rows))
