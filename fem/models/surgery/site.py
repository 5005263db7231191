"""A self-attention inside a model: what is read off it to build its replacement, and how that is put in its place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from fem.mixer import FreeEnergyMixer
from fem.models.surgery.head import FreeEnergyHead


class Refused(Exception):
    """Why an attention cannot be replaced, as the second half of a sentence."""


class CrossAttention(Refused):
    """It attends to another sequence, whose hidden states the gates do not see; it stays as it is."""


@dataclass(frozen=True)
class Site:
    """A self-attention, and the fields of a `FreeEnergyMixerConfig` that it decides.

    weight: one of its weights, whose device and dtype new ones take. fields: those of a head that keeps projections.
    graft: the original with a head in the place of its attention function, its parameters kept.
    compare: a forward hook of the original that says where a head in its place would compute something else.
    fresh: the fields of a mixer in its place; None where mixers are not called as it is.
    swap: a module that is called as the original is, and answers with a mixer.
    """

    module: nn.Module
    weight: Tensor
    fields: dict
    graft: Callable[[FreeEnergyHead], nn.Module]
    compare: Callable | None = None
    fresh: dict | None = None
    swap: Callable[[FreeEnergyMixer], nn.Module] | None = None
