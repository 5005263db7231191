"""The parameters that weight decay may shrink."""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from fem.checks import is_number


def decayed_names(model: nn.Module) -> list[str]:
    """Names of the parameters that weight decay is for: the weights of maps and embeddings.

    Not biases, norms and other vectors, and nothing that a module lists as `undecayed`: decay pulls a weight towards 0,
    but beta, A, D and M towards softplus(0), which is a temperature and a memory that nobody asked for.
    """
    kept = {id(p) for module in model.modules() for n in getattr(module, "undecayed", ()) for p in _behind(module, n)}
    return [name for name, p in model.named_parameters() if p.ndim > 1 and id(p) not in kept]


def _behind(module: nn.Module, name: str) -> Iterable[nn.Parameter]:
    """The parameter of this name, or those that a parametrization such as weight_norm, or pruning, makes it from."""
    if is_parametrized(module, name):
        return module.parametrizations[name].parameters()
    return [getattr(module, f"{name}_orig" if hasattr(module, f"{name}_orig") else name)]


class AsksNoDecay:
    """A module that names its parameters which weight decay should leave alone."""

    def no_weight_decay(self) -> set[str]:
        """Names of all parameters that weight decay should leave alone, as timm asks for them."""
        return {name for name, _ in self.named_parameters()}.difference(decayed_names(self))


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """The model's parameters for an optimiser of torch, in two groups: those that decay and those that do not.

        torch.optim.AdamW(fem.parameter_groups(model, weight_decay=0.1), lr=3e-4)

    `decayed_names` says which are which; frozen parameters are in neither. Raises TypeError unless model is a module
    and weight_decay a number, ValueError where that is negative or not finite.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got a {type(model).__name__}.")
    if not is_number(weight_decay):
        raise TypeError(f"weight_decay must be a number, got {weight_decay!r}.")
    if not 0 <= weight_decay < math.inf:
        raise ValueError(f"weight_decay must be finite and 0 or positive, got {weight_decay!r}.")
    decayed = set(decayed_names(model))
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not trained:
        raise ValueError(f"model must have parameters that train, got a {type(model).__name__} with none.")
    return [
        {"params": [p for name, p in trained if name in decayed], "weight_decay": weight_decay},
        {"params": [p for name, p in trained if name not in decayed], "weight_decay": 0.0},
    ]


def mark_undecayed(module: nn.Module) -> None:
    """Mark the parameters that a module lists as `undecayed` with `_no_weight_decay`, which other trainers look for."""
    for name in module.undecayed:
        module.get_parameter(name)._no_weight_decay = True
