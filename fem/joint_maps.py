"""The maps of a layer's features together on a GPU: as one product of rows, by one launch of a graph's token."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from fem import fused_layer
from fem.gates import SlimProjection, first_map
from fem.ops.common.backend import differentiated, exporting, plain_tensors
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
    captured, and under gradients; of more in graphs without gradients, which read each weight where it lies. Nor where
    an adapter, a hook or sharding has taken a map over.
    """
    if not (fused_layer.available(features) and features.numel() and product_dtype(features) in DTYPES):
        return None
    one, graph = features.shape[1] == 1, torch.compiler.is_compiling()
    if one and (features.shape[0] > MOST_ROWS or not (graph or torch.cuda.is_current_stream_capturing())):
        return None
    if graph and not one and (exporting() or not torch.is_grad_enabled()):
        return None
    if not plain_tensors(features):
        return None
    prior, gate, scales = layer.prior, layer.gate, [] if layer.value_scale is None else [layer.value_scale]
    # Columns of a product are kept together: queries and keys, which are turned, would stay beside what they became.
    joins = type(prior) in OURS and (one or not prior.widths(layer.config).key_maps)
    own = prior.maps() if joins else []
    gates = gate.maps()
    if one and (layer.config.gate_rank or 0) > MOST_RANK:
        gates = []
    slim = [one for one in gates if isinstance(one, SlimProjection)]
    firsts = [*own, layer.value, *map(first_map, gates)]
    if not fused_layer.untouched([*firsts, *scales], slim, [prior, gate]):
        return None
    found = (_of_a_token if one else _of_a_row)(features, firsts, slim, scales)
    if found is None:
        return None
    eta, found, known = found[: len(scales)], found[len(scales) :], iter(found[len(found) - len(gates) :])
    logits = [None if one is None else next(known) for one in (gate.inner, gate.outer)] if gates else features
    return found[: len(own)] or features, layer.scaled(found[len(own)], *(eta or [None])), logits


def _of_a_row(
    features: Tensor, firsts: list[nn.Module], slim: list[SlimProjection], scales: list[nn.Module]
) -> list[Tensor]:
    """What the values' modulation makes of h, if there is one, then each map of the features, slim gates' both."""
    from fem.ops.common.joined import joined  # by Triton, which the library does not require

    x, apart = features.to(product_dtype(features)).contiguous(), len(firsts) - len(slim)
    weights = [one.weight for one in firsts]
    weight, bias, _ = joined(x, weights, [one.bias for one in firsts], ())
    found = F.linear(x, weight, bias).split([len(one) for one in weights], -1)
    logits = [one.up(z) for one, z in zip(slim, found[apart:])]
    return [*(one(x[..., -one.in_features :]) for one in scales), *found[:apart], *logits]


def _of_a_token(
    features: Tensor, firsts: list[nn.Module], slim: list[SlimProjection], scales: list[nn.Module]
) -> list[Tensor] | None:
    """The same by one launch; nothing where a tensor asks for a gradient, or is not of the product's dtype."""
    maps, seconds = [*scales, *firsts], [one.up for one in slim]
    alone = len(maps) - len(slim)
    weights, biases = [one.weight for one in maps], [one.bias for one in maps[:alone] + seconds]
    ups = [None] * alone + [one.weight for one in seconds]
    given, dtype = [one for one in (*weights, *ups, *biases) if one is not None], product_dtype(features)
    if not plain_tensors(*given) or differentiated(features, *given):
        return None
    if features.dtype != dtype or not all(one.dtype == dtype and one.is_contiguous() for one in given):
        return None
    from fem.ops.common.row_maps import row_maps  # by Triton, which the library does not require

    features = features if features.stride(-1) == 1 else features.contiguous()
    inputs = [features[..., -one.in_features :] for one in scales] + [features] * len(firsts)
    return row_maps(inputs, weights, ups, biases)
