"""Free Energy Mixer: sequence mixers whose channels can each pick their own token.

>>> layer = FreeEnergyMixer(FreeEnergyMixerConfig(n_embd=512, n_head=8, prior_type="softmax"))
>>> y = layer(x)                                                            # (B, T, 512) -> (B, T, 512)
"""

from __future__ import annotations

from importlib import import_module

from fem.config import FreeEnergyMixerConfig
from fem.mixer import FreeEnergyMixer
from fem.optim import parameter_groups
from fem.priors import PRIORS
from fem.state import MixerState

__version__ = "0.1.0"
__all__ = ["PRIORS", "FreeEnergyMixer", "FreeEnergyMixerConfig", "MixerState", "parameter_groups"]


def __getattr__(name: str):
    """`replace_attention` and `fem.models` load on first use: they may need transformers, the layer does not."""
    if name not in ("replace_attention", "models"):
        raise AttributeError(f"module 'fem' has no attribute {name!r}")
    models = import_module("fem.models")
    return models if name == "models" else models.replace_attention
