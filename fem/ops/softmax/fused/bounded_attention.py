"""Attention in documents and windows on a card, by FlexAttention: it keeps its graph until the backward asks for it."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fem.ops.softmax.card_attention import attend_on_card
from fem.ops.softmax.support import Support

Bounds = Int[Tensor, "#b t"]


def bounded_attention(
    q: Tensor, k: Tensor, values: Tensor, scale: float, causal: bool, first: Bounds, end: Bounds, differentiated: bool
) -> tuple[Float[Tensor, "b t h w"], Float[Tensor, "b h t"]]:
    """`kernel_attention` of the keys from `first` on and before `end`."""
    leaves = [x.detach().requires_grad_(differentiated) for x in (q, k, values)]
    with torch.set_grad_enabled(differentiated):
        found, lse = attend_on_card(*leaves, Support(causal, scale, None, first, end))
    out = found.detach().contiguous()
    if differentiated:
        out.graph = leaves, found
    return out, lse.detach().contiguous()


def bounded_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, values: Tensor, out: Tensor, scale: float, causal: bool, first, end
) -> list[Tensor]:
    """Gradients of q, k and the values, (B, T, H, .).

    A compiled graph can be gone back through once. There is none for a second time, nor where hooks, such as those that
    offload, give a copy of `out`: it is made again.
    """
    if not hasattr(out, "graph"):
        out, _ = bounded_attention(q, k, values, scale, causal, first, end, True)
    leaves, found = out.graph
    del out.graph
    return [d.contiguous() for d in torch.autograd.grad(found, leaves, grad)]
