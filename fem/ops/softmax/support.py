"""Which keys each query sees and how it scores them; causality, windows and documents are passed on as one interval."""

from __future__ import annotations

from functools import reduce
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fem.ops.common.steps import portable
from fem.ops.common.tokens import Tokens

PAIRS = "Tensor? bias, Tensor? keep, Tensor? first, Tensor? end, bool causal, float scale"  # of an operator's schema


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


def _count_before(document: Int[Tensor, "b t"], bound: Int[Tensor, "b tq"]) -> Int[Tensor, "b tq"]:
    """How many tokens belong to a document before each bound; numbers of documents never fall along a row."""
    if portable():  # ONNX has no search
        return (document[:, None] < bound[..., None]).sum(-1)
    return torch.searchsorted(document, bound)


def intervals(
    queries: int, keys: int, causal: bool, window: int | None, tokens: Tokens | None, device: torch.device
) -> Intervals:
    """The intervals of the last `queries` of `keys` tokens; without causal, window and documents all see all."""
    here = torch.arange(queries, device=device)[None] + (keys - queries)
    first, end = torch.zeros_like(here), here + 1 if causal else torch.full_like(here, keys)
    if window is not None:
        window = min(window, 1 << 40)  # of which a tensor can hold the distances
        first, end = (here - window + 1).clamp_min(0), end if causal else (here + window).clamp_max(keys)
    if tokens is not None and tokens.document is not None:
        document = tokens.document.contiguous()
        own = document[:, keys - queries :].contiguous()
        first = torch.maximum(first, _count_before(document, own))
        end = end if causal else torch.minimum(end, _count_before(document, own + 1))
    return Intervals(first.int(), end.expand_as(first).int().contiguous())
