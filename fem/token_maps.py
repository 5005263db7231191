"""The maps of one token's features in one launch on a GPU, in graphs: in eager calls the host is slower at it."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from fem import fused_layer
from fem.gates import SlimProjection
from fem.ops.common.backend import differentiated, plain_tensors
from fem.ops.common.precision import product_dtype
from fem.priors import OURS

DTYPES = torch.bfloat16, torch.float16  # which tensor cores multiply
MOST_ROWS = 64  # beyond which a product for each map has the work to pay for its launch
MOST_RANK = 16  # of slim gates, which one block of the kernel holds


def columns(
    layer, features: Float[Tensor, "b t f"]
) -> tuple[list[Tensor] | Tensor, Float[Tensor, "b 1 h dv"], list[Tensor | None] | Tensor] | None:
    """What the maps make of one token's features: for the prior, the values, and the logits of lambda and g. The
    features stand for themselves where a prior is a user's own or gates are of a higher rank.

    None of eager calls, unless a CUDA graph is captured, of longer or wider calls, under gradients, and where an
    adapter, a hook or sharding has taken a map over.
    """
    if not (features.shape[1] == 1 and 0 < features.shape[0] <= MOST_ROWS and fused_layer.available(features)):
        return None
    if not (torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing()):
        return None
    prior, gate, scale = layer.prior, layer.gate, layer.value_scale
    own = prior.maps() if type(prior) in OURS else []
    gates = [one for one in (gate.inner, gate.outer) if one is not None]
    if (layer.config.gate_rank or 0) > MOST_RANK:
        gates = []
    slim = [one for one in gates if isinstance(one, SlimProjection)]
    maps = [*own, layer.value, *([] if scale is None else [scale]), *([one.down for one in slim] or gates)]
    whole, ups = len(maps) - len(slim), [one.up for one in slim]
    if not fused_layer.untouched(maps, slim, [prior, gate]):
        return None
    weights, biases = [one.weight for one in maps], [one.bias for one in maps[:whole] + ups]
    ups = [None] * whole + [one.weight for one in ups]
    if not _fit(features, [*weights, *ups, *biases]):
        return None
    from fem.ops.common.row_maps import row_maps  # by Triton, which the library does not require

    inputs = [features if one is not scale else features[..., layer.config.n_embd :] for one in maps]
    found = row_maps(inputs, weights, ups, biases)
    v = layer.scaled(found[len(own)], None if scale is None else found[len(own) + 1])
    logits = [None if gate.inner is None else found[-len(gates)], None if gate.outer is None else found[-1]]
    return found[: len(own)] or features, v, logits if gates else features


def _fit(features: Tensor, weights: list[Tensor | None]) -> bool:
    """Whether all have one dtype of 16 bits, rows lie side by side, and nothing asks for a gradient."""
    weights, dtype = [x for x in weights if x is not None], product_dtype(features)
    if dtype not in DTYPES or not plain_tensors(features, *weights) or differentiated(features, *weights):
        return False
    return features.dtype == dtype and all(x.dtype == dtype and x.is_contiguous() for x in weights)
