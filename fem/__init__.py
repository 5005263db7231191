"""Free Energy Mixer: sequence mixers whose channels can each pick their own token.

>>> layer = FreeEnergyMixer(FreeEnergyMixerConfig(n_embd=512, n_head=8, prior_type="softmax"))
>>> y = layer(x)                                                            # (B, T, 512) -> (B, T, 512)
"""

from __future__ import annotations

from importlib import import_module

from fem.config import FreeEnergyMixerConfig
from fem.mixer import FreeEnergyMixer
from fem.priors import PRIORS
from fem.state import MixerState

__version__ = "0.1.0"
__all__ = ["PRIORS", "FreeEnergyMixer", "FreeEnergyMixerConfig", "MixerState"]


LAZY = {"replace_attention": "fem.models", "FreeEnergyPooling": "fem.pooling", "FreeEnergyCrossMixer": "fem.pooling"}


def __getattr__(name: str):
    """What the layer does not need loads on first use; `fem.models` may need transformers."""
    if name == "models":
        return import_module("fem.models")
    if name not in LAZY:
        raise AttributeError(f"module 'fem' has no attribute {name!r}")
    return getattr(import_module(LAZY[name]), name)
