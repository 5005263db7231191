"""What runs here, where, and why."""

from __future__ import annotations

import os
import shutil
from importlib.metadata import PackageNotFoundError, version

import torch

from fem.experiments.common.run import processor, versions
from fem.experiments.common.tables import show_table
from fem.extras import DISTRIBUTION, extras
from fem.ops.common.backend import softmax_backend

WHY = {
    "sdpa": "torch's fused attention reads [v | exp(beta v)] in one call",
    "plain": "no fused kernel for this device: scores are materialised",
}


def devices() -> list[dict]:
    """Every device torch can use here, the backend that reads a softmax prior on it, and why that one."""
    names = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    if torch.backends.mps.is_available():
        names.append("mps")
    backends = {name: softmax_backend("auto", torch.device(name), torch.float32) for name in names}
    return [{"device": name, "what": _what(name), "reads by": by, "because": WHY[by]} for name, by in backends.items()]


def _what(device: str) -> str:
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    threads = f", {torch.get_num_threads()} threads on {os.cpu_count()} cores" if device == "cpu" else ""
    return processor() + threads


def compiler() -> dict:
    """Whether torch.compile can build code on the CPU."""
    name = next((name for name in ("g++", "clang++", "cl") if shutil.which(name)), None)
    return {
        "part": "torch.compile on CPU",
        "state": f"inductor, with {name}" if name else 'no C++ compiler: use backend="aot_eager"',
    }


def packages() -> list[dict]:
    """Every optional package: its version, or the command that installs its extra."""
    return [
        {"extra": extra, "package": name, "state": _state(extra, name)}
        for extra, names in extras().items()
        for name in names
    ]


def _state(extra: str, package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return f"missing: pip install '{DISTRIBUTION}[{extra}]'"


def command():
    """What runs here, where, and why: versions, devices, backends and optional packages."""
    show_table("Versions", [{"part": name, "state": found} for name, found in versions().items()] + [compiler()])
    show_table("Devices", devices())
    show_table("Optional packages", packages())
