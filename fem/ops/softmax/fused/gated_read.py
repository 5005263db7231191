"""The read and the gates of an attention on a GPU whose maps are somebody else's: a replaced attention's.

o = g ((1 - lambda) mean + lambda F), g and lambda from their logits                             (Eq. 4, 7, 10, 11)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from fem.ops.common.joined import by_tokens
from fem.ops.common.own_backward import OwnBackward
from fem.ops.softmax.fused.bounded_attention import ALL_KEYS, SEEN, SEEN_SCHEMA
from fem.ops.softmax.fused.layer_form import SETTINGS, Options
from fem.ops.softmax.fused.parts_read import Beside, Totals, read_parts, shapes_of, through_parts


def gated_read(
    options: Options,
    q: Float[Tensor, "b t h dk"],
    k: Float[Tensor, "b t hkv dk"],
    v: Float[Tensor, "b t hkv d"],
    inner: Float[Tensor, "b t h d"] | None,
    outer: Float[Tensor, "b t h d"] | None,
    theta: Float[Tensor, "hkv d"] | None,
    seen: Sequence[Tensor] = (),
) -> Float[Tensor, "b t h d"]:
    """o of a whole sequence of 16-bit numbers, differentiable once.

    theta: of beta, 1 without one. seen: as in `mixed_read`. Raises RuntimeError where its gradient is to be
    differentiated.
    """
    # Heads lie side by side in a token's row, which other tokens' rows follow at equal distances.
    parts = [x if x is None else by_tokens(x.flatten(2))[0].view(x.shape) for x in (q, k, v, inner, outer)]
    return _GATED_READ([*parts, theta, *(seen or ALL_KEYS)], *options)[0]


class _GatedRead(OwnBackward):
    """The results: those of `read_parts`."""

    name, fixed, settings = "gated_read", SEEN, SETTINGS
    tensors = "Tensor q, Tensor k, Tensor v, Tensor? inner, Tensor? outer, Tensor? theta" + SEEN_SCHEMA

    def forward(self, differentiated, tensors, *settings):
        *parts, theta = tensors[:6]
        return read_parts(Options.of(*settings), parts, parts[:2], theta, _beside(tensors), differentiated)

    def empty_results(self, tensors, *settings):
        return shapes_of(Options.of(*settings).form, tensors[0])

    def backward(self, grads, tensors, kept, *settings):
        (*parts, theta), (o, *kept) = tensors[:6], kept
        *others, d_theta = (None if x is None else torch.empty_like(x) for x in (*parts[2:], theta))
        totals, inputs = Totals((), (), (), d_theta), (grads[0], o, kept, parts, (None, None, *others))
        d_q, d_k, *_ = through_parts(Options.of(*settings), *inputs, totals, _beside(tensors))
        return [x for x in (d_q, d_k, *others, d_theta) if x is not None]


def _beside(tensors: Sequence[Tensor | None]) -> Beside:
    return Beside(tensors[2], None, [None] * 4, None, None, () if tensors[6] is None else tensors[6:])


_GATED_READ = _GatedRead()
