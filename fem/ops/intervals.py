"""What each query may see, as one interval of keys: how causality, windows and documents reach a kernel."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from fem.ops.tokens import Tokens

_DOCUMENT = 1 << 40  # more than any position


class Intervals(NamedTuple):
    """Query t sees the kept keys with first_t <= i < end_t. Neither end falls as t grows. keep=None: all are kept."""

    first: Int[Tensor, "#b tq"]
    end: Int[Tensor, "#b tq"]
    keep: Bool[Tensor, "b t"] | None

    def allowed(self, keys: int) -> Bool[Tensor, "#b tq t"]:
        """The same, pair by pair."""
        index = torch.arange(keys, device=self.first.device)
        inside = (self.first[..., None] <= index) & (index < self.end[..., None])
        return inside if self.keep is None else inside & self.keep[:, None]

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
    """The intervals of the last `queries` of `keys` tokens; any queries see all without causal, window and documents."""
    keep = None if tokens is None else tokens.keep
    document = None if tokens is None else tokens.document
    index = torch.arange(keys, device=device)[None]
    to_here = index[:, keys - queries :] + 1 if causal else torch.full((1, queries), keys, device=device)
    if document is None and window is None:
        return Intervals(torch.zeros_like(to_here).int(), to_here.int(), keep)
    position = index if tokens is None or tokens.position is None else tokens.position.view(-1, keys)
    document = torch.zeros_like(position) if document is None else document
    place = document * _DOCUMENT + position
    here = place[:, keys - queries :].contiguous()
    opening = here // _DOCUMENT * _DOCUMENT
    if keep is not None:
        place = torch.where(keep, place, -1)
    place = place.cummax(1).values.contiguous()  # a masked key stands where the kept one before it does
    here, opening = (x.expand(len(place), -1).contiguous() for x in (here, opening))
    first = torch.searchsorted(place, opening if window is None else torch.maximum(here - window + 1, opening))
    end = to_here.expand(len(first), -1)
    if not causal:
        last = opening + _DOCUMENT - 1 if window is None else here + window - 1
        end = torch.searchsorted(place, last, right=True)
    return Intervals(first.int().contiguous(), end.int().contiguous(), keep)
