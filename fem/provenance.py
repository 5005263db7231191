"""The record of where a run was made, and the folder that it is written to."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from fem.extras import installed

PACKAGES = (
    "free-energy-mixer",
    "torch",
    "numpy",
    "transformers",
    "tokenizers",
    "datasets",
    "accelerate",
    "neuralforecast",
)
CONFIG, RESULTS, PAGE = "config.json", "results.json", "report.md"


def check_output(output: Path, experiment: str | None = None) -> None:
    """Raises ValueError where `output` is a file, or a folder that is neither empty nor one of `fem EXPERIMENT`.

    Hidden files do not count. experiment: None leaves the content of a folder unchecked.
    """
    if output.exists() and not output.is_dir():
        raise ValueError(f"output must be a folder, got the file {str(output)!r}; choose another name.")
    if experiment is None:
        return
    config = read_json(output / CONFIG)
    if config is None:
        if strangers := {path.name for path in output.glob("[!.]*")}:
            raise ValueError(
                f"output must be empty or the folder of the same run, got {str(output)!r} with {min(strangers)!r} and "
                f"no {CONFIG} that can be read; choose another."
            )
        return
    other = config.get("experiment") if isinstance(config, dict) else None
    if other != experiment:
        what = f"a run of fem {other}" if other else "a config.json that belongs to no run, such as a model's"
        raise ValueError(f"output must not hold another experiment, got {str(output)!r} with {what}; choose another.")


def read_json(path: Path) -> Any:
    """The content of a JSON file, or None where there is no such file or it cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def write_json(path: Path, data: dict) -> None:
    """Write data as JSON: readers see the old file or the new one."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(data, indent=2, default=str) + "\n", encoding="utf-8")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name to write a file under, which is renamed when the block ends: readers see the old file or the
    new one. The name is hidden, as what a kill leaves of it is no file of a user."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def note(sentence: str) -> None:
    """Print a note on standard error; of torchrun's processes, only the first does."""
    if os.environ.get("RANK", "0") == "0":
        print(f"note: {sentence}", file=sys.stderr)


def first_line(error: BaseException) -> str:
    """The first line of what an error says; the name of its kind where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def versions() -> dict[str, str]:
    """Versions of Python and of the installed packages that results depend on."""
    packages = {package: installed(package) for package in PACKAGES}
    return {"python": platform.python_version()} | {name: known for name, known in packages.items() if known}


def hardware() -> dict[str, Any]:
    """Processor, threads and accelerators that a run used."""
    import torch

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {"processor": processor(), "cores": os.cpu_count(), "threads": torch.get_num_threads(), "gpus": gpus}


def circumstances() -> dict[str, Any]:
    """Versions, hardware and date, as every record of a run keeps them."""
    return {"versions": versions(), "hardware": hardware(), "date": now()}


def in_words(found: dict[str, Any]) -> tuple[str, str]:
    """The machine, and the versions, of `circumstances` as a page and a table show them."""
    hardware = found["hardware"]
    machine = ", ".join([hardware["processor"], f"threads: {hardware['threads']}", *hardware["gpus"]])
    return machine, ", ".join(f"{name} {version}" for name, version in found["versions"].items())


def provenance(command: str) -> str:
    """The last section of a page of results: the command, the date, the machine and the versions."""
    found = circumstances()
    machine, software = in_words(found)
    return f"## How this was made\n\n`{command}` on {found['date']}, {machine}; {software}.\n"


def processor() -> str:
    """The name of this machine's processor."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
