"""What a mixer remembers between two calls."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import torch
from jaxtyping import Bool, Int
from torch import Tensor


@dataclass(frozen=True)
class Cursor:
    """Where each row of a batch stands after the tokens seen so far.

    position: the position that the next kept token of the row's document takes.
    document: how many documents ended in the row.
    segment: the segment id of the row's last kept token; meaningful where `started`.
    started: whether the row has seen a kept token.
    """

    position: Int[Tensor, " b"]
    document: Int[Tensor, " b"]
    segment: Int[Tensor, " b"]
    started: Bool[Tensor, " b"]

    @classmethod
    def zero(cls, batch: int, device: torch.device | str) -> Cursor:
        none = torch.zeros(batch, dtype=torch.long, device=device)
        return cls(position=none, document=none, segment=none, started=none.bool())

    def map(self, change) -> Cursor:
        return Cursor(*(change(getattr(self, field.name)) for field in fields(self)))


@dataclass(frozen=True)
class MixerState:
    """The memory of one mixer layer: what its prior and its conditioner carry to the next token.

    Every tensor has the batch first. A state is never changed in place: a layer returns a new one.
    """

    layer: str  # what wrote it, in words; another kind of layer refuses it
    dtype: torch.dtype  # of the layer's input
    memory: dict[str, Tensor]  # the prior's own
    conditioner: Tensor | None  # the conditioner's hidden state, (B, H_c)
    cursor: Cursor

    def _tensors(self) -> Iterator[Tensor]:
        yield from self.memory.values()
        if self.conditioner is not None:
            yield self.conditioner
        yield from (getattr(self.cursor, field.name) for field in fields(self.cursor))

    def _map(self, change) -> MixerState:
        return replace(
            self,
            memory={name: change(tensor) for name, tensor in self.memory.items()},
            conditioner=None if self.conditioner is None else change(self.conditioner),
            cursor=self.cursor.map(change),
        )

    @property
    def batch(self) -> int:
        return self.cursor.position.shape[0]

    @property
    def device(self) -> torch.device:
        return self.cursor.position.device

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors of the state."""
        return sum(tensor.nbytes for tensor in self._tensors())

    def reorder(self, index: Int[Tensor, " rows"]) -> MixerState:
        """The state of the rows `index`, in that order; rows may repeat or be left out (beam search)."""
        return self._map(lambda tensor: tensor.index_select(0, index.to(tensor.device)))

    def to(self, device: torch.device | str) -> MixerState:
        """The same state on another device."""
        return self._map(lambda tensor: tensor.to(device))

    def check(self, layer: str, batch: int, dtype: torch.dtype, device: torch.device) -> None:
        """Raise ValueError unless the state was written by this kind of layer for inputs of this kind."""
        for what, got, wanted in (
            ("layer", self.layer, layer),
            ("batch size", self.batch, batch),
            ("input dtype", self.dtype, dtype),
            ("device", self.device, device),
        ):
            if got != wanted:
                raise ValueError(
                    f"state belongs to another {what}: it has {got}, this call has {wanted}; "
                    "pass the state that this layer returned for the same rows, or state=None to start anew."
                )
