"""TDC: the time-decay conditioner, a low-rank recurrence that hands local features to every projection."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fem.config import FreeEnergyMixerConfig
from fem.ops.common.tokens import Tokens
from fem.ops.conditioner.fused_conditioner import fits, fused_condition
from fem.ops.conditioner.plain_conditioner import ConvForm, plain_condition
from fem.projection import Projection


class TimeDecayConditioner(nn.Module):
    """h~_t = exp(-s_t) h~_{t-1} + u_t,    s = softplus(W_f x^), u = W_x x^, x^ = LayerNorm(x)                 (Eq. 33)
    h_t  = SiLU(sqrt(H_c) z_t) * LayerNorm(h~_t),    z = l2norm(softplus(W_s x^))                   (Appendix I.1)

    Appendix I.1 has SiLU(z_t), conv_form="paper", and the authors' file sqrt(H_c) z_t, conv_form="authors".

    x (B, T, D) -> [x, h] (B, T, D + H_c), and h~_T for the next call. Masked tokens add and decay nothing; h~ restarts
    where a document does. Bidirectional: half of the channels run backwards in time.
    """

    def __init__(self, config: FreeEnergyMixerConfig):
        super().__init__()
        hidden = config.conv_hidden
        self.form = ConvForm.named(config.conv_form, hidden)
        self.bidirectional = config.conv_bidirectional
        self.backend = config.backend
        self.norm_in = nn.LayerNorm(config.n_embd) if config.conv_norm_first else nn.Identity()
        self.project = Projection(config.n_embd, 3 * hidden, config.bias)
        self.norm = nn.LayerNorm(hidden)

    def forward(
        self, x: Float[Tensor, "b t d"], tokens: Tokens, hidden: Float[Tensor, "b c"] | None = None
    ) -> tuple[Float[Tensor, "b t f"], Float[Tensor, "b c"]]:
        maps = self.norm_in, self.project, self.norm  # x^; W_f x^, W_x x^, W_s x^; LayerNorm(h~)
        if not self.bidirectional and fits(self.backend, x, hidden, *maps):
            return fused_condition(x, tokens, hidden, *maps, self.form)
        projected, backend = self.project(self.norm_in(x)), "triton" if self.backend == "triton" else "auto"
        h, last = plain_condition(projected, tokens, hidden, self.norm, self.form, backend, self.bidirectional)
        return torch.cat([x, h.to(x.dtype)], -1), last
