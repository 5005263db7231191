"""From the conditioner's projections to its features."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fem.ops.common.tokens import Tokens
from fem.ops.conditioner.fused_conditioner import fits, fused_condition
from fem.ops.conditioner.plain_conditioner import ConvForm, plain_condition


def conditioned(
    projected: Float[Tensor, "b t three_c"],
    tokens: Tokens,
    hidden: Float[Tensor, "b c"] | None,
    norm: nn.Module,
    dtype: torch.dtype,
    form: ConvForm,
    backend: str = "auto",
    bidirectional: bool = False,
) -> tuple[Float[Tensor, "b t c"], Float[Tensor, "b c"]]:
    """h_t = SiLU(length l2norm(softplus(a_t))) * norm(h~_t),    h~_t = exp(-softplus(f_t)) h~_{t-1} + u_t;    and h~_T

    projected: [f, u, a]. hidden: h~ before the first token; None: 0. norm: LayerNorm over the channels. dtype: of h.
    form: the length, and whether there is a SiLU.
    Bidirectional: half of the channels run backwards in time.
    """
    if not bidirectional and fits(backend, norm, projected, hidden):
        return fused_condition(projected, tokens, hidden, norm, dtype, form)
    backend = "triton" if backend == "triton" else "auto"
    h, last = plain_condition(projected, tokens, hidden, norm, form, backend, bidirectional)
    return h.to(dtype), last
