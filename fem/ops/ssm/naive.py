"""The state space read in float64, by loops over its definition: slow, differentiable by plain autograd.

The tests compare every implementation with it; it shares no code with what it tests.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from fem.ops.common.naive_rows import decayed, read_rows
from fem.ops.common.read import Read


def naive_ssm_read(
    delta: Float[Tensor, "b t h dv"],
    A: Float[Tensor, "h dv n"],
    B: Float[Tensor, "b t n"],
    C: Float[Tensor, "b t n"],
    D: Float[Tensor, "h dv"],
    v: Float[Tensor, "b t h dv"],
    beta: Float[Tensor, "h dv"] | None,
    causal: bool = True,
    key_mask: Shaped[Tensor, "b t"] | None = None,
    segment_ids: Int[Tensor, "b t"] | None = None,
    normalize: bool = True,
) -> Read:
    """Mean and free energy under the impulse response of a selective state space model, in float64.

    s_tj(i) = sum_n C_tn exp(sum_{i<r<=t} delta_rj A_jn) delta_ij B_in + D_j [i = t]; for i > t over t <= r < i
    """
    delta, A, B, C, D, v = (tensor.double() for tensor in (delta, A, B, C, D, v))
    a = delta.unsqueeze(-1) * A

    def log_scores(b: int, t: int, seen: list[int]) -> Tensor:
        scores = []
        for i, decay in decayed(a[b], t, seen):
            terms = [decay + (C[b, t] * B[b, i]).log() + delta[b, i].log().unsqueeze(-1)]
            if i == t:
                terms.append(D.log().unsqueeze(-1))
            scores.append(torch.cat(terms, -1).logsumexp(-1))
        return torch.stack(scores)

    return read_rows(log_scores, v, beta, causal, key_mask, segment_ids, normalize)
