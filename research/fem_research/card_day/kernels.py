"""Where the device time of a train step goes: matrix products, attention, Triton's kernels, all others."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch

GROUPS = {
    "attention": re.compile("flash|fmha|cudnn.*sdpa|sdpa|mha_|attention", re.IGNORECASE),
    "products": re.compile("gemm|nvjet|cutlass|cublas|matmul", re.IGNORECASE),
    "Triton": re.compile("^triton_|^_"),  # inductor's, and functions of the library
}
MOST = 15


def shares(step: Callable[[], object]) -> dict | None:
    """Milliseconds of a step's kernels, whole and by group, and the longest kernels; None where there is no GPU."""
    if not torch.cuda.is_available():
        return None
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    taken = {
        event.key: event.self_device_time_total / 1e3
        for event in profile.key_averages()
        if event.device_type == torch.autograd.DeviceType.CUDA
    }
    groups = dict.fromkeys([*GROUPS, "others"], 0.0)
    for name, milliseconds in taken.items():
        groups[group_of(name)] += milliseconds
    longest = sorted(taken.items(), key=lambda pair: -pair[1])[:MOST]
    return {"milliseconds": sum(taken.values()), "groups": groups, "longest": {name[:100]: ms for name, ms in longest}}


def group_of(kernel: str) -> str:
    return next((group for group, pattern in GROUPS.items() if pattern.search(kernel)), "others")
