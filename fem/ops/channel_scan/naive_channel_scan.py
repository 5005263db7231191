"""The definition of the channel scan read, in float64."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from fem.ops.common.naive_rows import decays, read_rows
from fem.ops.common.read import Read


def naive_channel_scan_read(
    log_weight: Float[Tensor, "b t h dv"] | None,
    v: Float[Tensor, "b t h dv"],
    beta: Float[Tensor, "h dv"] | None,
    log_decay: Float[Tensor, "b t h dv"] | None = None,
    causal: bool = True,
    key_mask: Shaped[Tensor, "b t"] | None = None,
    segment_ids: Int[Tensor, "b t"] | None = None,
    normalize: bool = True,
) -> Read:
    """Mean and free energy under a weight per value channel that decays.

    s_tj(i) = exp(log_weight_ij + sum_{i<r<=t} log_decay_rj); for i > t the sum runs over t <= r < i
    """
    x = torch.zeros_like(v) if log_weight is None else log_weight
    a = torch.zeros_like(v) if log_decay is None else log_decay
    x, a, v = x.double(), a.double(), v.double()
    log_scores = lambda b, t, seen: x[b, seen] + decays(a[b], t, seen)  # noqa: E731
    return read_rows(log_scores, v, beta, causal, key_mask, segment_ids, normalize)
