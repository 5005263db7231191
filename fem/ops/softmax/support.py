"""Which keys each query sees and how it scores them; causality, windows and documents are passed on as one interval."""

from __future__ import annotations

from functools import reduce
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fem.ops.common.steps import portable, running_maximum
from fem.ops.common.tokens import Tokens

PAIRS = "Tensor? bias, Tensor? keep, Tensor? first, Tensor? end, bool causal, float scale"  # of an operator's schema
_DOCUMENT = 1 << 40  # more than any position


class Intervals(NamedTuple):
    """Query t sees the keys first_t <= i < end_t. Neither end falls as t grows.

    Masked keys inside an interval are not seen; `of_kept` reorders the keys so that none is inside.
    """

    first: Int[Tensor, "#b tq"]
    end: Int[Tensor, "#b tq"]

    def allowed(self, keys: int) -> Bool[Tensor, "#b tq t"]:
        """The same, pair by pair."""
        index = torch.arange(keys, device=self.first.device)
        return (self.first[..., None] <= index) & (index < self.end[..., None])

    def any_of(self, chosen: Bool[Tensor, "#b #h #tq t"]) -> Bool[Tensor, "#b #h tq 1"]:
        """Whether any key inside an interval is chosen, from their counts: no T x T mask."""
        before = torch.nn.functional.pad(chosen.cumsum(-1, dtype=torch.int32), (1, 0))
        first, end = (before.take_along_dim(x[:, None, :, None].long(), -1) for x in self)
        return first < end

    def of_kept(self, keep: Bool[Tensor, "b t"]) -> tuple[Intervals, Int[Tensor, " b"], Int[Tensor, "b t"]]:
        """The same among keys in another order, kept ones first; how many these are, and that order."""
        before = torch.nn.functional.pad(keep.cumsum(1), (1, 0))  # kept keys before each
        first, end = (before.gather(1, x.expand(keep.shape[0], -1).long()).int() for x in self)
        order = keep.long().argsort(dim=1, descending=True, stable=True)
        return Intervals(first, end), before[:, -1].int(), order


class Pairs(NamedTuple):
    """s_ti = scale q_t . k_i + bias_ti for the keys i that exist and that query t sees; its fields enter every op.

    keep: which keys exist; None: all. first, end: `Intervals`; None: a query sees all keys, or i <= t if causal.
    """

    bias: Float[Tensor, "#b #h #tq #t"] | None
    keep: Bool[Tensor, "b t"] | None
    first: Int[Tensor, "#b tq"] | None
    end: Int[Tensor, "#b tq"] | None
    causal: bool
    scale: float

    @classmethod
    def of(cls, bias, keep, seen: Intervals | None, causal: bool, scale: float) -> Pairs:
        return cls(bias, keep, *(seen or (None, None)), causal, scale)

    @property
    def seen(self) -> Intervals | None:
        return None if self.first is None else Intervals(self.first, self.end)

    def restricted(self) -> bool:
        """Whether anything but causality tells pairs apart."""
        return any(x is not None for x in self[:3])

    def allowed(self, queries: int, keys: int, device: torch.device) -> Bool[Tensor, "#b #h #tq t"]:
        """Which keys each query sees, pair by pair."""
        rules = [] if self.keep is None else [self.keep.view(self.keep.shape[0], 1, 1, -1)]
        if self.first is not None:
            rules.append(self.seen.allowed(keys)[:, None])
        elif self.causal or not rules:
            everything = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=device)
            rules.append(everything.tril() if self.causal else everything)
        rules += [] if self.bias is None else [~torch.isneginf(self.bias.detach())]
        return reduce(torch.logical_and, rules)


def _count_before(coordinate: Int[Tensor, "#b t"], bound: Int[Tensor, "#b tq"]) -> Int[Tensor, "b tq"]:
    """How many coordinates, which never fall along a row, lie below each bound."""
    if portable():  # ONNX has no search
        return (coordinate[:, None] < bound[..., None]).sum(-1)
    return torch.searchsorted(coordinate, bound)


def intervals(
    queries: int, keys: int, causal: bool, window: int | None, tokens: Tokens | None, device: torch.device
) -> Intervals:
    """The intervals of the last `queries` of `keys` tokens; without causal, window and documents all see all."""
    index = torch.arange(keys, device=device)[None]
    window = None if window is None else min(window, _DOCUMENT // 2)
    document, position, keep = (None, None, None) if tokens is None else (tokens.document, tokens.position, tokens.keep)
    first = torch.zeros(1, queries, dtype=torch.long, device=device)
    end = index[:, keys - queries :] + 1 if causal else torch.full_like(first, keys)
    if document is not None or window is not None:
        position = index if position is None else position.view(-1, keys)
        coordinate = (0 if document is None else document * _DOCUMENT) + position
        here = coordinate[:, keys - queries :].contiguous()
        opening = torch.zeros_like(here) if document is None else here // _DOCUMENT * _DOCUMENT
        if keep is not None:
            coordinate = torch.where(keep, coordinate, -1)
            here, opening = (x.expand(coordinate.shape[0], -1).contiguous() for x in (here, opening))
        coordinate = running_maximum(coordinate)  # a masked key stands where the kept one before it does
        first = _count_before(coordinate, opening if window is None else torch.maximum(here - window + 1, opening))
        if not causal:
            last = opening + _DOCUMENT - 1 if window is None else here + window - 1
            end = _count_before(coordinate, last + 1)
        end = end.expand_as(first)
    return Intervals(first.int(), end.int().contiguous())
