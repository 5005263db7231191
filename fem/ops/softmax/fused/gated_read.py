"""The read and the gates of an attention on a GPU whose maps are somebody else's: a replaced attention's.

o = g ((1 - lambda) mean + lambda F), g and lambda from their logits                             (Eq. 4, 7, 10, 11)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fem.ops.common.joined import by_tokens
from fem.ops.common.operator import recorded, refuse_second_derivatives
from fem.ops.common.own_backward import OwnBackward
from fem.ops.common.precision import softplus
from fem.ops.common.token_kernels import gated
from fem.ops.softmax.fused.bounded_attention import ALL_KEYS, SEEN, SEEN_SCHEMA, ranges_in_graph, with_lists
from fem.ops.softmax.fused.layer_form import SETTINGS, Options
from fem.ops.softmax.fused.parts_read import Beside, Totals, read_parts, shapes_of, through_parts
from fem.ops.softmax.softmax_read import softmax_read
from fem.ops.softmax.support import as_bias


def gated_read(
    options: Options,
    q: Float[Tensor, "b t h dk"],
    k: Float[Tensor, "b i hkv dk"],
    v: Float[Tensor, "b i hkv d"],
    inner: Float[Tensor, "b t h d"] | None,
    outer: Float[Tensor, "b t h d"] | None,
    theta: Float[Tensor, "hkv d"] | None,
    seen: Sequence[Tensor] = (),
    mask: Bool[Tensor, "#b 1 #t t"] | Float[Tensor, "#b 1 #t t"] | None = None,
) -> Float[Tensor, "b t h d"]:
    """o of 16-bit numbers, differentiable once where there are as many queries as keys.

    theta: of beta, 1 without one. seen: as in `mixed_read`; in graphs a mask of pairs may stand in its place, which is
    looked at when the graph runs. Raises RuntimeError where its gradient is to be differentiated.
    """
    parts = *_side_by_side(q, k, v, inner, outer), theta
    if mask is None:
        return _GATED_READ([*parts, *(seen or ALL_KEYS)], *options)[0]
    first, end, idle, known = ranges_in_graph(mask, bool(options.form.causal))
    o = _MASKED_READ([*parts, *with_lists(first, end, k.shape[1]), mask, known], *options)[0]
    return o.masked_fill(idle[..., None, None], 0.0)


def _side_by_side(*parts: Tensor | None) -> list[Tensor | None]:
    """Heads side by side in a token's row, which other tokens' rows follow at equal distances."""
    return [x if x is None else by_tokens(x.flatten(2))[0].view(x.shape) for x in parts]


class _GatedRead(OwnBackward):
    """The results: those of `read_parts`."""

    name, fixed, settings = "gated_read", SEEN, SETTINGS
    tensors = "Tensor q, Tensor k, Tensor v, Tensor? inner, Tensor? outer, Tensor? theta" + SEEN_SCHEMA

    def forward(self, differentiated, tensors, *settings):
        *parts, theta = tensors[:6]
        return read_parts(Options.of(*settings), parts, parts[:2], theta, _beside(tensors), differentiated)

    def empty_results(self, tensors, *settings):
        return shapes_of(Options.of(*settings).form, tensors[0], tensors[1].shape[1])

    def backward(self, grads, tensors, kept, *settings):
        (*parts, theta), (o, *kept) = tensors[:6], kept
        *others, d_theta = (None if x is None else torch.empty_like(x) for x in (*parts[2:], theta))
        totals, inputs = Totals((), (), (), d_theta), (grads[0], o, kept, parts, (None, None, *others))
        d_q, d_k, *_ = through_parts(Options.of(*settings), *inputs, totals, _beside(tensors))
        return [x for x in (d_q, d_k, *others, d_theta) if x is not None]


class _MaskedRead(_GatedRead):
    """Of a mask that says more than a range of keys for each query, `_composed`, which the backward runs again."""

    name, fixed, graphed = "masked_read", (*SEEN, "mask", "known"), False
    tensors = _GatedRead.tensors + ", Tensor mask, Tensor known"

    def forward(self, differentiated, tensors, *settings):
        if tensors[-1]:
            return super().forward(differentiated, tensors, *settings)
        results = self.empty_results(tensors, *settings)
        return [_composed(Options.of(*settings), *tensors[:6], tensors[-2]), *results[1:]]

    def backward(self, grads, tensors, kept, *settings):
        if tensors[-1]:
            return super().backward(grads, tensors, kept, *settings)
        with recorded():
            leaves = [x if x is None else x.detach().requires_grad_() for x in tensors[:6]]
            o = _composed(Options.of(*settings), *leaves, tensors[-2])
            found = torch.autograd.grad(o, [x for x in leaves if x is not None], grads[0])
        return [x.contiguous() for x in found]


def _composed(
    options: Options, q, k, v, inner: Tensor | None, outer: Tensor | None, theta: Tensor | None, mask: Tensor
) -> Float[Tensor, "b t h d"]:
    """o under any mask, by the reads and the gates of other calls; differentiable once."""
    beta = None if theta is None else softplus(theta, options.beta_start)
    how = {"causal": options.form.causal, "scale": options.scale, "bias": as_bias(mask, q.dtype)}
    read, logits = softmax_read(q, k, v, beta, **how), [x if x is None else x.flatten(2) for x in (inner, outer)]
    return gated(lambda *_: refuse_second_derivatives(), *read, *logits, False, options.eps)


def _beside(tensors: Sequence[Tensor | None]) -> Beside:
    seen = tensors[6 : 6 + len(SEEN)]
    return Beside(tensors[2], None, [None] * 4, None, None, () if seen[0] is None else seen)


_GATED_READ, _MASKED_READ = _GatedRead(), _MaskedRead()
