"""How parameters start that a checkpoint lacks."""

from __future__ import annotations

import torch
from torch import nn


def starts_itself(module: nn.Module) -> bool:
    """Whether a part, which is none of torch's own, knows how its parameters start."""
    return hasattr(module, "reset_parameters") and not type(module).__module__.startswith("torch.")


@torch.no_grad()
def start(module: nn.Module) -> None:
    """`module.reset_parameters`, but parameters that were loaded are kept."""
    loaded = [(p, p.clone()) for p in module.parameters() if getattr(p, "_is_hf_initialized", False)]
    module.reset_parameters()
    for parameter, value in loaded:
        parameter.copy_(value)
