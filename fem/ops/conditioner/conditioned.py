"""From a layer's input to its features, the input and behind it what the conditioner says of the tokens before."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fem.ops.common.tokens import Tokens
from fem.ops.conditioner.fused_conditioner import fits, fused_condition
from fem.ops.conditioner.plain_conditioner import ConvForm, plain_condition


def conditioned(
    x: Float[Tensor, "b t d"],
    tokens: Tokens,
    hidden: Float[Tensor, "b c"] | None,
    norm_in: nn.Module,
    project: nn.Module,
    norm: nn.Module,
    form: ConvForm,
    backend: str = "auto",
    bidirectional: bool = False,
) -> tuple[Float[Tensor, "b t f"], Float[Tensor, "b c"]]:
    """[x, h] and h~_T, with [f, u, a] = project(norm_in(x)) of each token:

    h_t = SiLU(length l2norm(softplus(a_t))) * norm(h~_t)        h~_t = exp(-softplus(f_t)) h~_{t-1} + u_t

    hidden: h~ before the first token; None: 0. norm: LayerNorm over the channels. form: the length, and whether there
    is a SiLU. Bidirectional: half of the channels run backwards in time.
    """
    if not bidirectional and fits(backend, x, hidden, norm_in, project, norm):
        return fused_condition(x, tokens, hidden, norm_in, project, norm, form)
    backend = "triton" if backend == "triton" else "auto"
    h, last = plain_condition(project(norm_in(x)), tokens, hidden, norm, form, backend, bidirectional)
    return torch.cat([x, h.to(x.dtype)], -1), last
