"""Free Energy Mixer: sequence mixers whose channels can each pick their own token.

>>> layer = FreeEnergyMixer(FreeEnergyMixerConfig(n_embd=512, n_head=8, prior_type="softmax"))
>>> y = layer(x)                                                            # (B, T, 512) -> (B, T, 512)
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fem import functional as functional
    from fem import models as models
    from fem import priors as priors
    from fem import theory as theory
    from fem.config import FreeEnergyMixerConfig
    from fem.mixer import FreeEnergyMixer
    from fem.models import replace_attention as replace_attention
    from fem.optim import parameter_groups
    from fem.pooling import FreeEnergyCrossMixer, FreeEnergyPooling
    from fem.priors import PRIORS
    from fem.state import MixerState

__version__ = "0.2.0"
__all__ = [
    "PRIORS",
    "FreeEnergyCrossMixer",
    "FreeEnergyMixer",
    "FreeEnergyMixerConfig",
    "FreeEnergyPooling",
    "MixerState",
    "parameter_groups",
]

# Loaded when first asked for: the command line starts without torch, the layer without transformers.
_HOMES = {
    "FreeEnergyCrossMixer": "fem.pooling",
    "FreeEnergyMixer": "fem.mixer",
    "FreeEnergyMixerConfig": "fem.config",
    "FreeEnergyPooling": "fem.pooling",
    "MixerState": "fem.state",
    "PRIORS": "fem.priors",
    "parameter_groups": "fem.optim",
    "replace_attention": "fem.models",
}
_MODULES = ("functional", "models", "priors", "theory")


def __getattr__(name: str):
    if name in _MODULES:
        return import_module(f"fem.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'fem' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_HOMES, *_MODULES})


# fem.models registers the models with transformers' Auto classes, and the forecaster with NeuralForecast.
if {"transformers", "neuralforecast"} & sys.modules.keys():
    import_module("fem.models")
