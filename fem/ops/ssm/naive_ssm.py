"""The definition of the state space read, in float64."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from fem.ops.common.naive_rows import decays, read_rows
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
    """Mean and free energy under the impulse response of a selective state space model.

    s_tj(i) = sum_n C_tn exp(sum_{i<r<=t} delta_rj A_jn) delta_ij B_in + D_j [i = t]; for i > t over t <= r < i
    """
    delta, A, B, C, D, v = (tensor.double() for tensor in (delta, A, B, C, D, v))
    a = delta.unsqueeze(-1) * A

    def log_scores(b: int, t: int, seen: list[int]) -> Tensor:
        through_states = decays(a[b], t, seen) + (C[b, t] * B[b, seen]).log()[:, None, None]
        scores = (through_states + delta[b, seen].log().unsqueeze(-1)).logsumexp(-1)
        return torch.stack([_log_sum(s, D) if i == t else s for i, s in zip(seen, scores)])

    return read_rows(log_scores, v, beta, causal, key_mask, segment_ids, normalize)


def _log_sum(log_s: Tensor, D: Tensor) -> Tensor:
    """log(s + D); at D = 0 its gradient there is 1 / s, which log D would not pass."""
    at_zero = log_s + D * (-log_s.detach()).clamp_max(700.0).exp()
    return torch.where(D > 0, torch.logaddexp(log_s, torch.where(D > 0, D, 1).log()), at_zero)
