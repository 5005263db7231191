"""`fem doctor`: what runs on this machine, by which backend, and what is missing."""

from __future__ import annotations

import os
import shutil

import torch

from fem.extras import extras, installed
from fem.ops.common.backend import softmax_backend
from fem.provenance import processor, versions
from fem.tables import show_table

WHY = "torch's fused attention reads [v | exp(beta v)] in one call"  # on a CPU, and on CUDA in float32


def devices() -> list[dict]:
    """Every device here that a layer runs on, the backend that computes a softmax read on it, and why."""
    what = {"cpu": f"{processor()}, threads: {torch.get_num_threads()}, cores: {os.cpu_count()}"}
    what |= {f"cuda:{index}": torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())}
    backends = {name: softmax_backend("auto", torch.device(name), torch.float32) for name in what}
    return [{"device": name, "what": what[name], "reads by": by, "because": WHY} for name, by in backends.items()]


def compiler() -> dict:
    """The compiler with which torch.compile builds code on the CPU, or the advice where there is none."""
    name = next((name for name in ("g++", "clang++", "cl") if shutil.which(name)), None)
    return {
        "part": "torch.compile on CPU",
        "state": f"inductor, with {name}" if name else 'no C++ compiler: use backend="aot_eager"',
    }


def packages() -> list[dict]:
    """A row for each extra: whether its packages are installed, or which are missing and the command for them."""
    rows = []
    for extra, names in extras().items():
        missing = [name for name in names if not installed(name)]
        state = f"missing {', '.join(missing)}: pip install '.[{extra}]'" if missing else "installed"
        rows.append({"extra": extra, "packages": len(names), "state": state})
    return rows


def show() -> None:
    """Print what runs on this machine and why."""
    show_table("Versions", [{"part": name, "state": version} for name, version in versions().items()] + [compiler()])
    show_table("Devices", devices())
    show_table("Optional packages", packages())
    if cards := torch.cuda.device_count():
        said = "softmax is read by torch's attention, scans as docs/kernels.md says. Try `fem doctor --gpu`."
        print(f"{cards} GPU: {said}")
    else:
        print("No GPU: every read runs on the processor, softmax by torch's attention and scans by their plain form.")
