"""torchtitan's trainer on CPUs, over gloo: `torchrun -m fem.train.titan.cpu --module fem.train.titan --config debug`.

torchtitan asks for an accelerator by name; here it finds the CPU, and zeros where it asks for the card's memory.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch


def find_cpu() -> None:
    """Let torchtitan, which is imported after it, find a CPU."""
    torch._utils._get_available_device_type = lambda: "cpu"
    functions = {
        "get_device_name": lambda device=None: "cpu",
        "get_device_properties": lambda device=None: SimpleNamespace(total_memory=1),
        "current_device": lambda: 0,
        "reset_peak_memory_stats": lambda device=None: None,
        "empty_cache": lambda: None,
        "memory_stats": lambda device=None: {},
    }
    for name, function in functions.items():
        setattr(torch.cpu, name, function)


if __name__ == "__main__":
    find_cpu()
    from torchtitan.train import main

    main()
