"""Who sees whom in a softmax read: one object from the door to the kernel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fem.ops.common.backend import guarded, portable
from fem.ops.common.kept_first import Order, kept_first
from fem.ops.common.precision import upcast
from fem.ops.common.shared import shared
from fem.ops.common.tokens import Tokens

_FAR = 1 << 40  # more than any position; a tensor can hold distances to it


HIDDEN = -1e3  # added to a score, it leaves no weight


class Support(NamedTuple):
    """Query t sees the keys first_t <= i < end_t that exist, with the scores s_ti = scale q_t . k_i + bias_ti.

    keep: which keys exist; None: all. first, end: neither falls as t grows; None: a query sees all keys, or i <= t if
    causal, which then has as many queries as keys. A bias of -inf forbids a pair.
    """

    causal: bool
    scale: float
    keep: Bool[Tensor, "b t"] | None = None
    first: Int[Tensor, "#b tq"] | None = None
    end: Int[Tensor, "#b tq"] | None = None
    bias: Float[Tensor, "#b #h #tq #t"] | None = None

    @property
    def restricted(self) -> bool:
        """Whether anything but causality tells pairs apart: a query may then see no key."""
        return any(x is not None for x in (self.keep, self.first, self.bias))

    def bands(self, queries: int, keys: int, rows: int) -> Iterator[tuple[slice, slice, Support]]:
        """Some queries at a time, the keys that any of them sees, and who sees whom among these; where nothing but
        causality bounds the keys, everything at once."""
        if self.first is None:
            yield slice(0, queries), slice(0, keys), self
            return
        low, high = self.first.amin(0).tolist(), self.end.amax(0).tolist()
        for start in range(0, queries, rows):
            here = slice(start, min(start + rows, queries))
            begin = min(low[start], keys - 1)  # queries that see no key, and begin behind the last, get a hidden one
            seen = slice(begin, max(high[here.stop - 1], begin + 1))
            keep = None if self.keep is None else self.keep[:, seen]
            ends = (x[:, here] - begin for x in (self.first, self.end))
            yield here, seen, Support(self.causal, self.scale, keep, *ends, self.bias_at(self.bias, here, seen))

    @staticmethod
    def bias_at(bias: Float[Tensor, "#b #h #tq #t"] | None, rows: slice, keys: slice) -> Tensor | None:
        """The part of a bias, or of something of its shape, that belongs to some queries and keys."""
        if bias is None:
            return None
        return bias[:, :, rows if bias.shape[2] > 1 else slice(None), keys if bias.shape[3] > 1 else slice(None)]

    def visible(self, queries: int, keys: int, device: torch.device) -> Bool[Tensor, "#b #h tq t"]:
        """Which keys each query sees, pair by pair."""
        first, end = (x[:, None, :, None] for x in bounds(self, queries, keys, device))
        index = torch.arange(keys, device=device)
        seen = (first <= index) & (index < end)
        seen = seen if self.keep is None else seen & self.keep[:, None, None]
        return seen if self.bias is None else seen & ~torch.isneginf(self.bias.detach())

    def sees(self, queries: int, keys: int, device: torch.device) -> Bool[Tensor, "#b #h tq"]:
        """Which queries see any key; without a bias in memory linear in their number."""
        if self.bias is not None:
            return self.visible(queries, keys, device).any(-1)
        first, end = (x.clamp(0, keys) for x in bounds(self, queries, keys, device))
        exists = torch.ones(1, keys, dtype=torch.bool, device=device) if self.keep is None else self.keep
        before = F.pad(exists.cumsum(1), (1, 0))  # how many exist before each place
        rows = max(len(first), len(before))
        before, first, end = (x.expand(rows, -1) for x in (before, first, end))
        return (before.gather(1, end) > before.gather(1, first))[:, None]

    def mask(self, queries: int, keys: int, device: torch.device, hidden: float) -> Float[Tensor, "#b #h tq t"]:
        """What is added to the scores, pair by pair: the bias, and `hidden` where a key is not seen."""
        bias = torch.zeros((), dtype=torch.float32, device=device) if self.bias is None else upcast(self.bias)
        return torch.where(self.visible(queries, keys, device), bias, hidden)


def existing(support: Support, rows: int, keys: int) -> Bool[Tensor, "b t"] | None:
    """Which keys exist; None: all. A key that a bias hides from all queries does not."""
    keep, bias = support.keep, support.bias
    if bias is not None:
        seen = ~torch.isneginf(bias.detach()).all(2).all(1)
        keep = seen.expand(-1, keys) if keep is None else keep & seen
    return keep if keep is None or keep.shape[0] == rows else keep.expand(rows, -1)


def bounds(support: Support, queries, keys, device: torch.device) -> tuple[Int[Tensor, "#b tq"], Int[Tensor, "#b tq"]]:
    """first and end, written out. Graphs have symbols for the numbers of queries and keys."""
    if support.first is not None:
        return support.first, support.end
    row = torch.arange(queries, device=device)[None]
    return torch.zeros_like(row), row + 1 if support.causal else torch.full_like(row, keys)


def support(
    queries: int,
    keys: int,
    device: torch.device,
    causal: bool,
    scale: float,
    window: int | None = None,
    bias: Float[Tensor, "..."] | None = None,
    tokens: Tokens | None = None,
) -> Support:
    """What the last `queries` of `keys` tokens see. A window counts tokens as they stand; a document sees itself."""
    keep, document = (None, None) if tokens is None else (tokens.keep, tokens.document)
    bias = None if bias is None else bias[(None,) * (4 - bias.dim())]
    if queries == 1 and window is not None and guarded(keys <= window):
        window = None  # it hides none of these keys
    if window is None and document is None and not (causal and 1 < queries < keys):
        return Support(guarded(causal and queries > 1), scale, keep, bias=bias)
    return Support(causal, scale, keep, *seen_keys(queries, keys, device, causal, window, document), bias)


@shared
def seen_keys(
    queries: int,
    keys: int,
    device: torch.device,
    causal: bool,
    window: int | None,
    document: Int[Tensor, "b t"] | None,
    order: Order | None = None,
) -> tuple[Int[Tensor, "#b tq"], Int[Tensor, "#b tq"]]:
    """first and end under a window and in documents, of tokens in an order, if any, whose masked ones nobody sees; a
    row of masked tokens alone sees its first."""
    row = torch.arange(queries, device=device)[None] + (keys - queries)
    first, end = torch.zeros_like(row), row + 1 if causal else torch.full_like(row, keys)
    if window is not None:
        window, column = min(window, _FAR), row if order is None else order.column
        keys_before = (lambda x: x) if order is None else order.kept_before
        first = keys_before((column - window + 1).clamp_min(0))
        end = end if causal else keys_before((column + window).clamp_max(keys))
    if document is not None:
        document = document.contiguous()
        own = document[:, keys - queries :].contiguous()
        first = torch.maximum(first, _before(document, own))
        end = end if causal else torch.minimum(end, _before(document, own + 1))
    if order is not None:
        end = torch.minimum(end, order.kept.sum(1, keepdim=True)).clamp_min(1)
        first = torch.minimum(first, end - 1)
    return first.int(), end.expand_as(first).int().contiguous()


@shared
def seen_in_cache(
    queries: int, keep: Bool[Tensor, "b t"], window: int | None, document: Int[Tensor, "b t"] | None
) -> tuple[Int[Tensor, "b tq"], Int[Tensor, "b tq"], Order]:
    """first and end of the last `queries` of a cache whose kept keys are read first, and that order. Masked queries
    see any key."""
    _, order = kept_first(keep, None)
    column = torch.arange(keep.shape[1] - queries, keep.shape[1], device=keep.device).expand(len(keep), -1)
    first, end = torch.zeros_like(column), order.kept_before(column + 1).clamp_min(1)
    if window is not None:
        first = order.kept_before((column - window + 1).clamp_min(0))
    if document is not None:
        in_order = document.gather(1, order.order).cummax(1).values  # masked tokens go on with the last document
        first = torch.maximum(first, _before(in_order, document[:, -queries:].contiguous()))
    return torch.minimum(first, end - 1).int(), end.int(), order


def _before(document: Int[Tensor, "b t"], bound: Int[Tensor, "b tq"]) -> Int[Tensor, "b tq"]:
    """How many tokens belong to documents before each bound; numbers of documents never fall along a row."""
    if portable():  # ONNX has no search
        return (document[:, None] < bound[..., None]).sum(-1)
    return torch.searchsorted(document, bound)


def as_bias(allowed: Bool[Tensor, "..."] | Float[Tensor, "..."], dtype: torch.dtype) -> Float[Tensor, "..."]:
    """0 where a pair is allowed, -inf where it is not; of a float mask, the lowest numbers become -inf."""
    if allowed.dtype == torch.bool:
        return allowed.to(dtype).log()
    if not allowed.is_floating_point():
        raise TypeError(f"a mask must be bool, or floating-point numbers to add to scores, got dtype {allowed.dtype}.")
    return allowed.masked_fill(allowed <= torch.finfo(allowed.dtype).min / 2, -torch.inf)
