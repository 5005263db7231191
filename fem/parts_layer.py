"""A softmax layer on a GPU by kernels between what its maps have made and its output map.

`fem.fused_layer` computes the maps as well. This is for maps with adapters and hooks, for those of somebody else's
attention, and for tokens that go on from a cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from fem import fused_layer, joint_maps
from fem.call import Call
from fem.fused_layer import (
    Kernel,
    Widths,
    appended,
    in_kept_order,
    is_bounded,
    seen_by_tokens,
    widths_of,
)
from fem.ops.common.backend import plain_tensors, watched
from fem.ops.softmax.softmax_read import are_few
from fem.ops.softmax.support import seen_in_cache, seen_keys
from fem.priors import SoftmaxPrior
from fem.priors.kv_cache import packing_of, within_window
from fem.state import CACHED


def mixed(
    layer, call: Call, features: Float[Tensor, "b t f"]
) -> tuple[Float[Tensor, "b t h dv"], dict[str, Tensor] | None] | None:
    """`fused_layer.mixed` of a softmax layer, by maps of whatever kind and from any state."""
    config, prior, streams = layer.config, layer.prior, call.memory is not None
    known = type(prior) is SoftmaxPrior and not watched(prior) and config.backend in ("auto", "sdpa")
    if not (fused_layer.available(call.x) and known) or config.value_logexp_cap is not None:
        return None
    if streams and (torch.is_grad_enabled() or torch.compiler.is_compiling() or are_few(call.x)):
        return None
    if packing_of(call.memory or {}) is not None:  # of a state that a CPU made
        return None
    bounded, widths = streams or is_bounded(layer, call), widths_of(config)
    kernel = _kernel(layer, call.x, (config.n_head, config.kv_heads, config.key_width), widths, config.causal, bounded)
    if kernel is None:
        return None
    order = None
    if not streams:
        call, features, order = in_kept_order(call, features)
    x = call.x if order is None else features[..., : config.n_embd]  # of [x, h], which is in that order already
    p, v, g = joint_maps.columns(layer, features) or (features, layer.modulated(x, features), features)
    (q, k), logits = prior.queries_and_keys(p, call.tokens.position), layer.gate.logits(g)
    if not plain_tensors(q, k, v, *logits):
        return None
    if streams:
        memory = appended(layer, call.memory, k, v, call.tokens)
        k, v, seen = _in_cache(memory, call.x.shape[1], config.window)
        return _read(layer, kernel, widths, logits, q, k, v, True, None, seen), within_window(memory, config.window)
    seen = seen_by_tokens(layer, call, order) if bounded else ()
    o = _read(layer, kernel, widths, logits, q, k, v, config.causal, None, seen)
    return o if order is None else order.as_before(o), None


def _in_cache(
    memory: dict[str, Tensor], queries: int, window: int | None
) -> tuple[Float[Tensor, "b t h d"], Float[Tensor, "b t h d"], list[Tensor]]:
    """The keys and values of a cache, its kept tokens first, and which of them each of its last tokens sees."""
    from fem.ops.softmax.fused.bounded_attention import with_lists  # by Triton, which the library does not require

    k, v = (memory[name].transpose(1, 2) for name in CACHED)
    keep, document, time = memory.get("keep"), memory.get("document"), k.shape[1]
    if keep is None:
        return k, v, with_lists(*seen_keys(queries, time, k.device, True, window, document), time)
    *bounds, order = seen_in_cache(queries, keep, window, document)
    return order.kept_first(k), order.kept_first(v), with_lists(*bounds, time)


def gated(
    head,
    logits: Sequence[Tensor | None],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float | None,
    mask: Tensor | None = None,
) -> Float[Tensor, "b tq h d"] | None:
    """`mixed` of what somebody else's maps have made: queries, keys, values, and the logits of lambda and g, (B, T,
    H d) each or None. `head` has the gate and beta. mask: of pairs, as in `seen_of`, besides causality. Nothing where
    another form has to read them.
    """
    free = 0 if head.beta is None else v.shape[3]
    widths = v.shape[3], free, free > 0
    kernel = _kernel(head, q, (q.shape[2], k.shape[2], q.shape[3]), widths, causal, mask is not None)
    if kernel is None or not plain_tensors(q, k, v, *logits):
        return None
    if k.shape[1] != q.shape[1] and not _goes_on(q, causal, mask):
        return None
    inputs = head, kernel, widths, logits, q, k, v, causal, scale
    if mask is None:
        return _read(*inputs)
    alike = mask.shape[1] == 1 and mask.shape[2] in (1, q.shape[1])  # for all heads
    if not alike or mask.requires_grad:
        return None
    if torch.compiler.is_compiling():
        return _read(*inputs, mask=mask)
    from fem.ops.softmax.fused.bounded_attention import seen_of

    known = seen_of(mask, causal)
    if known is None:
        return None
    o, idle = _read(*inputs, known[0]), known[1]
    return o if idle is None else o.masked_fill(idle[..., None, None], 0.0)


def _goes_on(q: Tensor, causal: bool, mask: Tensor | None) -> bool:
    """Whether a mask says what each query sees of a cache, and nobody reads so few of them faster."""
    if mask is None or mask.shape[2] != q.shape[1] or causal or are_few(q):
        return False
    return not (torch.is_grad_enabled() or torch.compiler.is_compiling())


def _read(
    head, kernel: Kernel, widths: Widths, logits, q, k, v, causal, scale, seen: Sequence[Tensor] = (),
    mask: Tensor | None = None,
) -> Float[Tensor, "b tq h d"]:  # fmt: skip
    """o by that kernel of attention."""
    from fem.ops.softmax.fused.gated_read import gated_read  # by Triton, too
    from fem.ops.softmax.fused.layer_form import Form, Options

    heads, width = q.shape[2], v.shape[3]
    form = Form(heads, k.shape[2], q.shape[3], *widths, causal, False, logits[1] is not None, 0, 0, *kernel)
    start, theta = (0.0, None) if head.beta is None else (head.beta.start, head.beta.theta)
    options = Options(form, q.shape[3] ** -0.5 if scale is None else scale, head.gate.config.eps, start)
    *parts, inner, outer = (x if x is None else x.to(fused_layer.DTYPE) for x in (q, k, v, *logits))
    by_heads = [x if x is None else x.unflatten(-1, (heads, width)) for x in (inner, outer)]
    return gated_read(options, *parts, *by_heads, theta, seen, mask)


def _kernel(head, x: Tensor, sizes: tuple[int, int, int], widths: Widths, causal: bool, bounded: bool) -> Kernel | None:
    """The kernel of attention by which `_read` reads parts like x of these heads and key width; None: it does not."""
    theta, parts = ([], [head.gate]) if head.beta is None else ([head.beta.theta], [head.gate, head.beta])
    if not fused_layer.takes(x, head.gate) or any(map(watched, parts)) or not plain_tensors(x, *theta):
        return None
    return fused_layer.attention_kernel(x.device.index or 0, *sizes, *widths[:2], causal, bounded)
