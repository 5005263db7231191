"""The channel scan read in float64, by loops over its definition: slow, differentiable by plain autograd.

The tests compare every implementation with it; it shares no code with what it tests.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from fem.ops.common.naive_rows import decayed, read_rows
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
    """Mean and free energy under a weight per value channel that decays, in float64.

    s_tj(i) = exp(log_weight_ij + sum_{i<r<=t} log_decay_rj); for i > t the sum runs over t <= r < i
    """
    x = torch.zeros_like(v) if log_weight is None else log_weight
    a = torch.zeros_like(v) if log_decay is None else log_decay
    x, a, v = x.double(), a.double(), v.double()
    read = lambda b, t, seen: torch.stack([x[b, i] + d for i, d in decayed(a[b], t, seen)])  # noqa: E731
    return read_rows(read, v, beta, causal, key_mask, segment_ids, normalize)
