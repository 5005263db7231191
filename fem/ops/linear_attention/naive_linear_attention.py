"""The definition of the linear attention read, in float64."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from fem.ops.common.naive_rows import decays, read_rows
from fem.ops.common.read import LOG_ZERO, NO_WEIGHT, Read


def naive_linear_attention_read(
    q: Float[Tensor, "b t h dk"],
    k: Float[Tensor, "b t h dk"],
    v: Float[Tensor, "b t h dv"],
    beta: Float[Tensor, "h df"] | None,
    log_decay: Float[Tensor, "b t h *dk"] | None = None,
    causal: bool = True,
    key_mask: Shaped[Tensor, "b t"] | None = None,
    segment_ids: Int[Tensor, "b t"] | None = None,
    normalize: bool = True,
    free_values: Float[Tensor, "b t h df"] | None = None,
) -> Read:
    """Mean and free energy under linear attention (`linear`), whose keys may decay (`gla`).

        s_t(i) = sum_c q_tc exp(sum_{i<r<=t} log_decay_rc) k_ic over the allowed i; for i > t the sum has t <= r < i
        mean_tj = sum_i s_t(i) v_ij / Z_t        F_tj = (1/beta_j) log(sum_i s_t(i) exp(beta_j f_ij) / Z_t)
        Z_t = sum_i s_t(i), or 1 with normalize=False; f are the free values, v without them

    The gradient of a feature that is exactly 0 is 0: its logarithm has none.
    """
    q, k = (x.double().relu().log().clamp_min(LOG_ZERO) for x in (q, k))
    v = v.double()
    g = torch.zeros_like(q) if log_decay is None else log_decay.double()
    g = g if g.ndim == 4 else g.unsqueeze(-1)

    def log_scores(b: int, t: int, seen: list[int]) -> Tensor:
        scores = (q[b, t] + decays(g[b], t, seen) + k[b, seen]).logsumexp(-1, keepdim=True)
        return scores.masked_fill(scores < NO_WEIGHT, -torch.inf)

    return read_rows(log_scores, v, beta, causal, key_mask, segment_ids, normalize, free_values)
