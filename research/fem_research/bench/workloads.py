"""A forward and a train step of every mixer, and what they cost."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fem.functional import softmax_read
from fem_research.bench.cases import Case
from fem_research.bench.mixers import BASELINE, Size, build_blocks, build_mixer
from fem_research.common import baselines
from fem_research.common.measure import Step, alternate, cpu_growth, gpu_growth, in_fresh_process, operations

SHORT = 16
Result = dict[str, int | float | None]


class Workload(NamedTuple):
    forward: Step
    train: Step
    parameters: int | None


def runs(case: Case, name: str, device: torch.device) -> bool:
    """Whether the mixer can be measured here."""
    if name in baselines.BASELINES:
        return baselines.available(name, device)
    return name != "DiffTrans"  # in the paper's table, but in no library


def workload(case: Case, name: str, device: torch.device, time: int | None = None) -> Workload:
    """Steps on a random input, whose gradient is computed too. time: another length than the case's."""
    size = case.size if time is None else Size(case.size.batch, time, case.size.width, case.size.heads)
    dtype = getattr(torch, case.dtype)
    if case.part == "read":
        return _of_read(name, size, device, dtype)
    build = build_blocks(name, size, case.layers) if case.layers else build_mixer(name, size)
    module = build.to(device, dtype)
    x = torch.randn(size.batch, size.time, size.width, device=device, dtype=dtype, requires_grad=True)
    parameters = list(module.parameters())
    return _steps(lambda: module(x), [x, *parameters], sum(p.numel() for p in parameters))


def _of_read(name: str, size: Size, device: torch.device, dtype: torch.dtype) -> Workload:
    """Attention over values of width d, or FEM's read of values of width d / 2: equal weights and equal operations."""
    width = size.width // size.heads
    draw = lambda d: torch.randn(size.batch, size.time, size.heads, d, device=device, dtype=dtype, requires_grad=True)  # noqa: E731
    q, k, v = draw(width), draw(width), draw(width if name == BASELINE else width // 2)
    if name == BASELINE:
        heads_first = lambda: (x.transpose(1, 2) for x in (q, k, v))  # noqa: E731
        return _steps(lambda: F.scaled_dot_product_attention(*heads_first(), is_causal=True), [q, k, v], None)
    beta = torch.full((size.heads, width // 2), 1.95, device=device, requires_grad=True)
    backend = name.partition(", ")[2] or "auto"
    return _steps(lambda: torch.cat(softmax_read(q, k, v, beta, backend=backend), -1), [q, k, v, beta], None)


def _steps(output: Callable[[], Tensor], leaves: list[nn.Parameter | Tensor], parameters: int | None) -> Workload:
    gradient = None

    def forward() -> None:
        with torch.no_grad():
            output()

    def train() -> None:
        nonlocal gradient
        for leaf in leaves:
            leaf.grad = None
        y = output()
        gradient = torch.randn_like(y) if gradient is None else gradient
        y.backward(gradient)

    return Workload(forward, train, parameters)


def measure(case: Case, device: torch.device, seconds: float) -> dict[str, Result]:
    """Costs of every mixer that runs here: seconds, operations, and bytes that a train step adds."""
    built = {name: prepared(case, name, device) for name in case.mixers if runs(case, name, device)}
    work = {name: steps for name, steps in built.items() if steps is not None}
    forward = alternate({name: steps.forward for name, steps in work.items()}, seconds / 3, device)
    train = alternate({name: steps.train for name, steps in work.items()}, seconds, device)
    memory = _memory(case, list(work), device)
    return {
        name: {
            "parameters": steps.parameters,
            "forward_s": forward[name],
            "train_s": train[name],
            "train_extra_bytes": memory[name],
            "forward_flop": operations(steps.forward) if case.layers else None,
            "train_flop": operations(steps.train) if case.layers else None,
        }
        for name, steps in work.items()
    }


def prepared(case: Case, name: str, device: torch.device) -> Workload | None:
    """The mixer's steps, after a first train step; None, with a warning, where memory or a baseline's library fails."""
    try:
        steps = workload(case, name, device)
        steps.train()
        return steps
    except torch.cuda.OutOfMemoryError:
        torch.cuda.empty_cache()
        why = "the GPU has too little memory"
    except Exception as error:
        if name not in baselines.BASELINES:
            raise
        why = f"{type(error).__name__}: {error}"
    warnings.warn(f"{name} is left out of {case.name}: {why}.", stacklevel=2)
    return None


def _memory(case: Case, names: list[str], device: torch.device) -> dict[str, int | None]:
    if device.type == "cuda":
        return {name: gpu_growth(workload(case, name, device).train) for name in names}
    return in_fresh_process(cpu_growths, case, names, torch.get_num_threads())


def cpu_growths(case: Case, names: list[str], threads: int) -> dict[str, int | None]:
    """Bytes that a train step of each mixer adds, after a short one that loads all code. For `in_fresh_process`."""
    torch.set_num_threads(threads)
    found, cpu = {}, torch.device("cpu")
    for name in names:
        workload(case, name, cpu, SHORT).train()
        steps = workload(case, name, cpu)
        found[name] = cpu_growth(steps.train)
        del steps
    return found
