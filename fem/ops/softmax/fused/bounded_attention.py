"""Attention in documents and windows on a card, by FlexAttention."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fem.ops.common.operator import operator, recorded
from fem.ops.common.shared import known_of
from fem.ops.softmax.card_attention import attend_on_card, block_lists
from fem.ops.softmax.fused.fused_attention import together
from fem.ops.softmax.support import HIDDEN, Support

SEEN = tuple(f"seen_{n}" for n in range(10))  # what `with_lists` returns, as arguments of an operator
SEEN_SCHEMA = "".join(f", Tensor? {name}" for name in SEEN)
ALL_KEYS = (None,) * len(SEEN)


def with_lists(first: Int[Tensor, "#b tq"], end: Int[Tensor, "#b tq"], keys: int) -> list[Tensor]:
    """`seen`: the first key that a query sees, the first one behind, and the lists of their blocks."""
    return [first, end, *block_lists(Support(False, 1.0, None, first, end), first.shape[1], keys, first.device)]


@known_of
def seen_of(
    mask: Bool[Tensor, "#b 1 #tq t"] | Float[Tensor, "#b 1 #tq t"], causal: bool
) -> tuple[list[Tensor], Bool[Tensor, "#b t"] | None] | None:
    """`seen` of a mask of pairs, which is True or adds 0 where a query sees a key: of padding on either side, of
    documents, windows and causality, and of causality besides. And which queries see no key; None: all see one. Those
    are given some key.

    None where the mask says more than a range of keys for each query. The host waits, once for a mask.
    """
    first, end, idle, flags = _ranges_of(mask, causal)
    known, some = flags.tolist()
    return (with_lists(first, end, mask.shape[3]), idle if some else None) if known else None


@operator("ranges_in_graph(Tensor mask, bool causal) -> Tensor[]")
def ranges_in_graph(mask: Tensor, causal: bool) -> list[Tensor]:
    """`_ranges_of`, the last of it on the host, in compiled graphs, which call it once for all layers of a model."""
    first, end, idle, flags = _ranges_of(mask, causal)
    return [first, end, idle, flags[0].cpu()]


@ranges_in_graph.register_fake
def _empty_ranges(mask: Tensor, causal: bool) -> list[Tensor]:
    made = lambda dtype: mask.new_empty(len(mask), mask.shape[3], dtype=dtype)  # noqa: E731
    return [made(torch.int32), made(torch.int32), made(torch.bool), torch.empty((), dtype=torch.bool, device="cpu")]


def _ranges_of(mask: Tensor, causal: bool) -> tuple[Tensor, Tensor, Tensor, Bool[Tensor, " 2"]]:
    """The first key that each query sees, and the first one behind; which queries see none, and are given some; whether
    the mask says no more than that, and whether there are such queries."""
    mask = mask[:, 0]
    sees = mask if mask.dtype == torch.bool else mask == 0
    count, key = sees.sum(-1), torch.arange(mask.shape[-1], device=mask.device)
    first = sees.byte().argmax(-1)
    ranges = (first[..., None] <= key) & (key < (first + count)[..., None])
    known = (ranges == sees).all() if mask.dtype == torch.bool else ((ranges == sees) & (sees | (mask <= HIDDEN))).all()
    if mask.shape[1] == 1:  # for all queries, of which there are as many as keys
        first, count = (x.expand(-1, len(key)) for x in (first, count))
    end = first + count
    end = torch.minimum(end, key + 1) if causal else end
    idle = end <= first
    first = torch.where(idle, end.cummax(1).values.clamp_max(len(key) - 1), first)
    end = torch.maximum(end, first + 1)
    rising = (first.diff(dim=1) >= 0).all() & (end.diff(dim=1) >= 0).all()
    return first.int(), end.int(), idle, torch.stack([known & rising, idle.any()])


def bounded_attention(
    q: Tensor,
    k: Tensor,
    values: Sequence[Tensor],
    scale: float,
    causal: bool,
    seen: Sequence[Tensor],
    differentiated: bool,
) -> tuple[Float[Tensor, "b t h w"], Float[Tensor, "b h t"]]:
    """`kernel_attention` of the keys that are seen, of pieces of the values. Where differentiated, the first result has
    its graph, which lives as long."""
    first, end, *lists = seen
    leaves = [x.detach().requires_grad_(differentiated) for x in (q, k, *values)]
    support = Support(causal, scale, None, first, end)
    with recorded() if differentiated else torch.no_grad():
        found, lses = zip(*(attend_on_card(*leaves[:2], x, support, lists) for x in leaves[2:]))
    out = together([x.detach() for x in found])
    if differentiated:
        out.graph = leaves, found
    return out, lses[0].detach().contiguous()


def bounded_attention_backward(
    grads: Sequence[Tensor],
    q: Tensor,
    k: Tensor,
    values: Sequence[Tensor],
    out: Tensor,
    scale: float,
    causal: bool,
    seen: Sequence[Tensor],
) -> list[Tensor]:
    """Gradients of q, k and all values, (B, T, H, .), from those of the pieces.

    A compiled graph can be gone back through once. There is none for a second time, nor where hooks, such as those that
    offload, give a copy of `out`, nor in a compiled layer that is captured: it is made again.
    """
    if not hasattr(out, "graph"):
        out, _ = bounded_attention(q, k, values, scale, causal, seen, True)
    leaves, found = out.graph
    del out.graph
    d_q, d_k, *d_values = torch.autograd.grad(found, leaves, grads)
    return [d_q.contiguous(), d_k.contiguous(), together(d_values)]
