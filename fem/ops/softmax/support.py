"""The keys that each query sees, as one interval: the form in which causality, windows and documents are passed on."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from fem.ops.common.steps import portable, running_maximum
from fem.ops.common.tokens import Tokens

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

    def of_kept(self, keep: Bool[Tensor, "b t"]) -> tuple[Intervals, Int[Tensor, " b"], Int[Tensor, "b t"]]:
        """The same among keys in another order, kept ones first; how many these are, and that order."""
        before = torch.nn.functional.pad(keep.cumsum(1), (1, 0))  # kept keys before each
        first, end = (before.gather(1, x.expand(keep.shape[0], -1).long()).int() for x in self)
        order = keep.long().argsort(dim=1, descending=True, stable=True)
        return Intervals(first, end), before[:, -1].int(), order


def _count_before(place: Int[Tensor, "#b t"], bound: Int[Tensor, "#b tq"]) -> Int[Tensor, "b tq"]:
    """How many places, which never fall along a row, lie below each bound."""
    if portable():  # ONNX has no search
        return (place[:, None] < bound[..., None]).sum(-1)
    return torch.searchsorted(place, bound)


def intervals(
    queries: int, keys: int, causal: bool, window: int | None, tokens: Tokens | None, device: torch.device
) -> Intervals:
    """The intervals of the last `queries` of `keys` tokens; without causal, window and documents all see all."""
    index = torch.arange(keys, device=device)[None]
    document, position, keep = (None, None, None) if tokens is None else (tokens.document, tokens.position, tokens.keep)
    first = torch.zeros(1, queries, dtype=torch.long, device=device)
    end = index[:, keys - queries :] + 1 if causal else torch.full_like(first, keys)
    if document is not None or window is not None:
        position = index if position is None else position.view(-1, keys)
        place = (0 if document is None else document * _DOCUMENT) + position
        here = place[:, keys - queries :].contiguous()
        opening = torch.zeros_like(here) if document is None else here // _DOCUMENT * _DOCUMENT
        if keep is not None:
            place = torch.where(keep, place, -1)
            here, opening = (x.expand(place.shape[0], -1).contiguous() for x in (here, opening))
        place = running_maximum(place)  # a masked key stands where the kept one before it does
        first = _count_before(place, opening if window is None else torch.maximum(here - window + 1, opening))
        if not causal:
            last = opening + _DOCUMENT - 1 if window is None else here + window - 1
            end = _count_before(place, last + 1)
        end = end.expand_as(first)
    return Intervals(first.int(), end.int().contiguous())


def allowed_pairs(
    q: Tensor, k: Tensor, bias: Tensor | None, keep: Tensor | None, seen: Intervals | None, causal: bool
) -> Bool[Tensor, "#b #h tq t"]:
    """Which keys each query sees, pair by pair; seen: None: all, or i <= t if causal."""
    if seen is not None:
        allowed = seen.allowed(k.shape[1])[:, None]
    else:
        allowed = torch.ones(1, 1, q.shape[1], k.shape[1], dtype=torch.bool, device=q.device)
        allowed = allowed.tril() if causal else allowed
    if keep is not None:
        allowed = allowed & keep[:, None, None]
    return allowed if bias is None else allowed & ~torch.isneginf(bias.detach())
