"""Whether Triton kernels compute on this card what the plain form does.

Checked once for every kind of call, before `backend="auto"` first takes the kernels: a small example is read and
differentiated by the kernels on the card, and by the plain form in float64 on the CPU. That runs in a process of its
own: it touches neither the caller's autograd, random numbers and streams nor its memory, and a kernel that crashes or
hangs does not stop the caller. The verdict is kept on disk for this card, torch, Triton and these kernels.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fem.extras import installed

SECONDS = 300  # that a check may take; most of them go to the compiler
TOKENS = 129  # of the examples: two whole chunks of 64 tokens, and one more
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-2}  # of the norm of what is compared
PACKAGE = Path(__file__).parents[2]  # fem


class Kind(NamedTuple):
    """A kind of call: the folder of the read in fem/ops, the dtype of its values, and the arguments of its example."""

    op: str
    dtype: torch.dtype
    arguments: tuple[int | str | bool | None, ...] = ()

    def encoded(self) -> list:
        return [self.op, str(self.dtype).removeprefix("torch."), *self.arguments]

    @classmethod
    def decoded(cls, parts: list) -> Kind:
        return cls(parts[0], getattr(torch, parts[1]), tuple(parts[2:]))


class Example(NamedTuple):
    """Inputs in float64: `tokens` are read in the kind's dtype, `exact` in float32. read: of a backend and inputs."""

    tokens: dict[str, Tensor]
    exact: dict[str, Tensor]
    read: Any


_known: dict[tuple[Kind, int], bool] = {}
_warned = False


@torch.compiler.assume_constant_result
def passed(op: str, dtype: torch.dtype, arguments: tuple, device: int | None, traced: bool) -> bool:
    """Whether kernels of this kind passed on the card. Checks them, unless a graph is being traced: then what nobody
    has checked counts as failed, and nothing is remembered.
    """
    kind, index = Kind(op, dtype, arguments), torch.cuda.current_device() if device is None else device
    if (kind, index) not in _known:
        verdict = stored(kind, index)
        if verdict is None and traced:
            _warn(f"no eager call has checked {kind.encoded()} yet", "make one, or run `fem doctor --gpu`, before")
            return False
        verdict = verdict or check(kind, index)
        if not verdict["passed"]:
            _warn(f"{kind.encoded()}: {verdict['why']}", "`fem doctor` says which kinds passed")
        _known[kind, index] = verdict["passed"]
    return _known[kind, index]


def check(kind: Kind, index: int) -> dict:
    """The verdict of a fresh process on this card: passed, why not, seconds. Kept, unless the process died."""
    started = time.monotonic()
    try:
        done = _in_a_process(kind, f"cuda:{index}")
        lines = done.stdout.strip().splitlines()
        if done.returncode == 0:
            why, died = json.loads(lines[-1])["why"], False
        else:
            why, died = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1], True
    except Exception as error:  # of any kind: the plain form is used then
        why, died = f"{type(error).__name__}: {error}", True
    verdict = {
        "kind": kind.encoded(),
        "passed": why is None,
        "why": why,
        "seconds": round(time.monotonic() - started, 1),
    }
    if not died:
        _store(kind, index, verdict)
    return verdict


def _in_a_process(kind: Kind, device: str) -> subprocess.CompletedProcess:
    path = os.pathsep.join([str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", __name__, json.dumps(kind.encoded()), device]
    return subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=SECONDS
    )


def difference(kind: Kind, device: torch.device) -> str | None:
    """The first output or gradient in which the kernels differ from the plain form in float64; None: they agree."""
    random = torch.Generator().manual_seed(0)
    example = example_of(kind, random)
    tokens = {name: x.to(kind.dtype) for name, x in example.tokens.items()}
    exact = {name: x.float() for name, x in example.exact.items()}
    ours = {name: x.to(device).requires_grad_() for name, x in (tokens | exact).items()}
    wanted = {name: x.double().requires_grad_() for name, x in (tokens | exact).items()}
    got, expected = example.read("triton", ours), example.read("plain", wanted)
    weights = [torch.rand(x.shape, dtype=torch.float64, generator=random) for x in expected]
    gradients = (
        torch.autograd.grad(sum((x * w.to(x.device)).sum() for x, w in zip(reads, weights)), list(leaves.values()))
        for reads, leaves in ((got, ours), (expected, wanted))
    )
    names = [*(f"output {number}" for number in range(len(got))), *(f"gradient of {name}" for name in ours)]
    for name, *pair in zip(names, *([*reads, *d] for reads, d in zip((got, expected), gradients))):
        one, other = (x.detach().double().cpu() for x in pair)
        error = ((one - other).norm() / other.norm().clamp_min(1e-3)).item()
        if not error <= TOLERANCE[kind.dtype]:
            return f"{name} is off by {error:.2g} of its norm"
    return None


def example_of(kind: Kind, random: torch.Generator) -> Example:
    draw = import_module(f"fem.ops.{kind.op}.kernels.example").example
    return draw(lambda *shape: torch.rand(*shape, dtype=torch.float64, generator=random), *kind.arguments)


def verdicts() -> Iterator[dict]:
    """All that is kept on disk, of any card and version."""
    for path in sorted(folder().glob("*.json")):
        try:
            yield json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue


def folder() -> Path:
    """Where verdicts are kept: free-energy-mixer/self_check of the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "free-energy-mixer" / "self_check"


def stored(kind: Kind, index: int) -> dict | None:
    """What is kept of this kind for this card, these versions and these kernels."""
    try:
        return json.loads(_path(kind, index).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _store(kind: Kind, index: int, verdict: dict) -> None:
    """Write it under another name, then rename: readers see all or nothing. A full or read-only disk is no error."""
    path, record = _path(kind, index), verdict | setting(index) | {"date": time.strftime("%Y-%m-%d")}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
            json.dump(record, file)
        os.replace(file.name, path)
    except OSError:
        return


def _path(kind: Kind, index: int) -> Path:
    text = json.dumps([kind.encoded(), setting(index)], sort_keys=True)
    return folder() / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"


@cache
def setting(index: int) -> dict[str, str]:
    """What a verdict is valid for: the card, the versions of torch and Triton, and the source of the kernels."""
    sources = hashlib.sha256()
    for path in sorted((PACKAGE / "ops").rglob("kernels/*.py")):
        sources.update(path.read_bytes())
    triton = installed("triton") or "unknown"  # under another name, as in a ROCm build
    return {"card": card(index), "torch": torch.__version__, "triton": triton, "kernels": sources.hexdigest()[:16]}


def card(index: int) -> str:
    properties = torch.cuda.get_device_properties(index)
    return f"{properties.name}, {getattr(properties, 'gcnArchName', '')}{properties.major}.{properties.minor}"


def _warn(what: str, advice: str) -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(f"backend='auto' computes without our kernels: {what}; {advice}.", stacklevel=4)


if __name__ == "__main__":
    kind, device = Kind.decoded(json.loads(sys.argv[1])), torch.device(sys.argv[2])
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        found = difference(kind, device)
    except Exception as error:  # of the compiler, the driver, or ours
        found = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[-1]}"
    print(json.dumps({"why": found}))
