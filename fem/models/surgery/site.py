"""A self-attention inside a model: what is read off it to build its replacement, and how that is put in its place."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor, nn

from fem.mixer import FreeEnergyMixer
from fem.models.surgery.head import FreeEnergyHead


class Refused(Exception):
    """Why an attention cannot be replaced, as the second half of a sentence."""


class CrossAttention(Refused):
    """It attends to another sequence, whose hidden states the gates do not see; it stays as it is."""


@dataclass(frozen=True)
class Site(ABC):
    """A self-attention module and the place it holds: `model.get_submodule(path)`, an attribute of `parent`."""

    module: nn.Module
    path: str
    parent: nn.Module | None

    @property
    @abstractmethod
    def weight(self) -> Tensor:
        """One of the original's weights: new ones take its device and dtype."""

    @property
    @abstractmethod
    def fields(self) -> dict:
        """The fields of a FreeEnergyMixerConfig that the original decides, whatever mixer replaces it."""

    @property
    def softmax_fields(self) -> dict:
        """The fields that the original decides of a mixer with a softmax prior alone."""
        return {}

    @property
    @abstractmethod
    def widths(self) -> dict:
        """The fields that a head which keeps the original's projections needs besides."""

    @property
    def replaced(self) -> bool:
        return any(isinstance(part, (FreeEnergyHead, FreeEnergyMixer)) for part in self.module.children())

    @abstractmethod
    def graft(self, head: FreeEnergyHead) -> nn.Module:
        """The original with `head` in the place of its attention function, its parameters kept."""

    @abstractmethod
    def swap(self, mixer: FreeEnergyMixer) -> nn.Module:
        """A module that is called as the original is, and answers with `mixer`."""

    def put(self, module: nn.Module) -> None:
        if self.parent is not None:
            setattr(self.parent, self.path.rpartition(".")[2], module)
