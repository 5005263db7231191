"""What each query may see, as one interval of keys: how causality, windows and documents reach a kernel."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from fem.ops.common.tokens import Tokens

_DOCUMENT = 1 << 40  # more than any position


class Intervals(NamedTuple):
    """Query t sees the keys first_t <= i < end_t. Neither end falls as t grows.

    With masked tokens the keys meant are those listed in `order`: the `kept` ones first, in their order.
    """

    first: Int[Tensor, "#b tq"]
    end: Int[Tensor, "#b tq"]
    kept: Int[Tensor, " b"] | None = None
    order: Int[Tensor, "b t"] | None = None

    def allowed(self, keys: int) -> Bool[Tensor, "#b tq t"]:
        """The same, pair by pair."""
        index = torch.arange(keys, device=self.first.device)
        return (self.first[..., None] <= index) & (index < self.end[..., None])

    def rows_of_key_blocks(self, keys: int, key_block: int, query_block: int) -> Int[Tensor, "#b blocks 4"]:
        """Per block of keys: where the queries that see any of it begin, where those begin and end that see all of it,
        and where they end; the first three are multiples of query_block."""
        top = torch.arange(0, keys, key_block, device=self.first.device, dtype=torch.int32).expand(len(self.first), -1)
        top = top.contiguous()
        bottom = top + key_block
        begin = torch.searchsorted(self.end, top, right=True) // query_block * query_block
        whole = -(torch.searchsorted(self.end, bottom) // -query_block) * query_block
        whole_end = torch.searchsorted(self.first, top, right=True) // query_block * query_block
        end = torch.searchsorted(self.first, bottom)
        return torch.stack([begin, whole, torch.maximum(whole, whole_end), end], -1).int()


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
        opening = here // _DOCUMENT * _DOCUMENT
        if keep is not None:
            place = torch.where(keep, place, -1)
            here, opening = (x.expand(len(place), -1).contiguous() for x in (here, opening))
        place = place.cummax(1).values  # a masked key stands where the kept one before it does
        first = torch.searchsorted(place, opening if window is None else torch.maximum(here - window + 1, opening))
        if not causal:
            last = opening + _DOCUMENT - 1 if window is None else here + window - 1
            end = torch.searchsorted(place, last, right=True)
        end = end.expand_as(first)
    if keep is None:
        return Intervals(first.int(), end.int().contiguous())
    before = torch.nn.functional.pad(keep.cumsum(1), (1, 0))  # kept keys before each
    first, end = (before.gather(1, x.expand(len(keep), -1)).int() for x in (first, end))
    order = keep.long().argsort(dim=1, descending=True, stable=True)
    return Intervals(first, end, before[:, -1].int(), order)
