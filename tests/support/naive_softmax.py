"""The definition of the softmax read, in float64."""

from __future__ import annotations

from jaxtyping import Float, Int, Shaped
from torch import Tensor

from fem.ops.common.naive_rows import read_rows
from fem.ops.common.read import Read


def naive_softmax_read(
    q: Float[Tensor, "b tq h dk"],
    k: Float[Tensor, "b t hkv dk"],
    v: Float[Tensor, "b t hkv dv"],
    beta: Float[Tensor, "hkv df"] | None,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    bias: Float[Tensor, "..."] | None = None,
    key_mask: Shaped[Tensor, "b t"] | None = None,
    segment_ids: Int[Tensor, "b t"] | None = None,
    free_values: Float[Tensor, "b t hkv df"] | None = None,
) -> Read:
    """The mean of v and the free energy of f = free_values (None: v), entry by entry, in float64.

    p_ti = softmax_i(scale q_t . k_i + bias_ti) over the allowed i
    mean_tj = sum_i p_ti v_ij        F_tj = (1 / beta_j) log sum_i p_ti exp(beta_j f_ij)        (Eq. 4)
    """
    batch, queries, heads, width = q.shape
    scale = width**-0.5 if scale is None else scale
    q, k, v = q.double(), _per_head(k, heads).double(), _per_head(v, heads).double()
    f = None if free_values is None else _per_head(free_values, heads)
    beta = None if beta is None else _per_head(beta, heads)
    if bias is not None:
        bias = bias.double().expand(batch, heads, queries, k.shape[1])

    def log_scores(b: int, t: int, seen: list[int]) -> Tensor:
        row = t - k.shape[1] + queries
        scores = scale * (q[b, row] * k[b, seen]).sum(-1, keepdim=True)
        return scores if bias is None else scores + bias[b, :, row, seen].T.unsqueeze(-1)

    return read_rows(log_scores, v, beta, causal, key_mask, segment_ids, True, f, window, queries)


def _per_head(x: Tensor, heads: int) -> Tensor:
    return x.repeat_interleave(heads // x.shape[-2], -2)
