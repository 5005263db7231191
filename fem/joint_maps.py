"""The maps of a layer's features together on a GPU: as one product in eager calls, by one launch of a graph's token."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from fem import fused_layer
from fem.gates import SlimProjection
from fem.ops.common.backend import differentiated, plain_tensors
from fem.ops.common.precision import product_dtype
from fem.priors import OURS

DTYPES = torch.bfloat16, torch.float16  # which tensor cores multiply
MOST_ROWS = 64  # of one token, beyond which a product for each map has the work to pay for its launch
MOST_RANK = 16  # of slim gates of one token, which one block of the kernel holds


def columns(
    layer, features: Float[Tensor, "b t f"]
) -> tuple[list[Tensor] | Tensor, Float[Tensor, "b t h dv"], list[Tensor | None] | Tensor] | None:
    """What the maps make of the features: for the prior, the values, and the logits of lambda and g. The features stand
    for themselves where a prior is a user's own, or gates of one token are of a higher rank.

    None where nothing is gained: of one token in eager calls, where the host is slower at it, unless a CUDA graph is
    captured, and under gradients; of more in graphs. Nor where an adapter, a hook or sharding has taken a map over.
    """
    if not (fused_layer.available(features) and features.numel() and product_dtype(features) in DTYPES):
        return None
    one, graph = features.shape[1] == 1, torch.compiler.is_compiling()
    if one and (features.shape[0] > MOST_ROWS or not (graph or torch.cuda.is_current_stream_capturing())):
        return None
    if graph and not one:
        return None
    prior, gate, scale = layer.prior, layer.gate, layer.value_scale
    # Columns of a product are kept together: queries and keys, which are turned, would stay beside what they became.
    joins = type(prior) in OURS and (one or not prior.widths(layer.config).key_maps)
    own = prior.maps() if joins else []
    gates = [projection for projection in (gate.inner, gate.outer) if projection is not None]
    if one and (layer.config.gate_rank or 0) > MOST_RANK:
        gates = []
    slim = [projection for projection in gates if isinstance(projection, SlimProjection)]
    firsts = [*own, layer.value, *([projection.down for projection in slim] or gates)]
    if not fused_layer.untouched([*firsts, *([] if scale is None else [scale])], slim, [prior, gate]):
        return None
    found = (_of_a_token if one else _of_a_row)(features, firsts, slim, scale)
    if found is None:
        return None
    found, eta = found
    logits = [
        None if projection is None else found[n] for projection, n in ((gate.inner, -len(gates)), (gate.outer, -1))
    ]
    v = layer.scaled(found[len(own)], eta)
    return found[: len(own)] or features, v, logits if gates else features


def _of_a_row(
    features: Tensor, firsts: list[nn.Module], slim: list[SlimProjection], scale: nn.Module | None
) -> tuple[list[Tensor], Tensor | None] | None:
    """What each map makes of the features, of slim gates both maps, and what the values' modulation does."""
    weights, biases = [one.weight for one in firsts], [one.bias for one in firsts]
    if not plain_tensors(features):
        return None
    from fem.ops.common.joined import joined  # by Triton, which the library does not require

    x = features.to(product_dtype(features)).contiguous()
    weight, bias, _ = joined(x, weights, None if all(one is None for one in biases) else biases, ())
    found = list(F.linear(x, weight, bias).split([len(one) for one in weights], -1))
    found[len(found) - len(slim) :] = [one.up(z) for one, z in zip(slim, found[len(found) - len(slim) :])]
    return found, None if scale is None else scale(x[..., -scale.in_features :])


def _of_a_token(
    features: Tensor, firsts: list[nn.Module], slim: list[SlimProjection], scale: nn.Module | None
) -> tuple[list[Tensor], Tensor | None] | None:
    """The same by one launch; nothing where a tensor asks for a gradient, or is not of the product's dtype."""
    maps, ups = [*firsts, *([] if scale is None else [scale])], [None] * len(firsts)
    for n, one in enumerate(slim, len(firsts) - len(slim)):
        ups[n] = one.up
    weights, biases = [one.weight for one in maps], [(up or one).bias for one, up in zip(firsts, ups)]
    seconds = [None if up is None else up.weight for up in ups]
    given, dtype = [one for one in (*weights, *seconds, *biases) if one is not None], product_dtype(features)
    if not plain_tensors(features, *given) or differentiated(features, *given):
        return None
    if features.dtype != dtype or not all(one.dtype == dtype and one.is_contiguous() for one in given):
        return None
    from fem.ops.common.row_maps import row_maps  # by Triton, which the library does not require

    none = [None] * (len(maps) - len(firsts))
    inputs = [features] * len(firsts) + [features[..., -scale.in_features :] for scale in maps[len(firsts) :]]
    found = row_maps(inputs, weights, seconds + none, biases + none)
    return found[: len(firsts)], found[-1] if none else None
