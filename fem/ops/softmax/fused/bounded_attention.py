"""Attention in documents and windows on a card, by FlexAttention."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fem.ops.common.operator import recorded
from fem.ops.softmax.card_attention import attend_on_card, block_lists
from fem.ops.softmax.support import Support


def with_lists(first: Int[Tensor, "#b t"], end: Int[Tensor, "#b t"]) -> list[Tensor]:
    """`seen`: the first key that a token sees, the first one behind, and the lists of their blocks."""
    time = first.shape[1]
    return [first, end, *block_lists(Support(False, 1.0, None, first, end), time, time, first.device)]


def bounded_attention(
    q: Tensor, k: Tensor, values: Tensor, scale: float, causal: bool, seen: Sequence[Tensor], differentiated: bool
) -> tuple[Float[Tensor, "b t h w"], Float[Tensor, "b h t"]]:
    """`kernel_attention` of the keys that are seen. Where differentiated, the first result has its graph, which lives
    as long."""
    first, end, *lists = seen
    leaves = [x.detach().requires_grad_(differentiated) for x in (q, k, values)]
    with recorded() if differentiated else torch.no_grad():
        found, lse = attend_on_card(*leaves, Support(causal, scale, None, first, end), lists)
    out = found.detach().contiguous()
    if differentiated:
        out.graph = leaves, found
    return out, lse.detach().contiguous()


def bounded_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, values: Tensor, out: Tensor, scale: float, causal: bool, seen: Sequence[Tensor]
) -> list[Tensor]:
    """Gradients of q, k and the values, (B, T, H, .).

    A compiled graph can be gone back through once. There is none for a second time, nor where hooks, such as those that
    offload, give a copy of `out`, nor in a compiled layer that is captured: it is made again.
    """
    if not hasattr(out, "graph"):
        out, _ = bounded_attention(q, k, values, scale, causal, seen, True)
    leaves, found = out.graph
    del out.graph
    return [d.contiguous() for d in torch.autograd.grad(found, leaves, grad)]
