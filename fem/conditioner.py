"""TDC: the time-decay conditioner, a low-rank recurrence that hands local features to every projection."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from fem.config import FreeEnergyMixerConfig
from fem.ops.common.precision import upcast
from fem.ops.common.tokens import Tokens
from fem.ops.decay_scan.read import decay_scan
from fem.projection import Projection


class TimeDecayConditioner(nn.Module):
    """h~_t = exp(-s_t) h~_{t-1} + u_t,    s = softplus(W_f x^), u = W_x x^, x^ = LayerNorm(x)                 (Eq. 33)
    h_t  = SiLU(l2norm(softplus(W_s x^)) sqrt(H_c)) * LayerNorm(h~_t)                              (Appendix I.1)

    x (B, T, D) -> h (B, T, H_c), and h~_T for the next call. Masked tokens add and decay nothing; h~ restarts where a
    document does. Bidirectional: half of the channels run backwards in time.
    """

    def __init__(self, config: FreeEnergyMixerConfig):
        super().__init__()
        hidden = config.conv_hidden
        self.bidirectional = config.conv_bidirectional
        self.backend = "triton" if config.backend == "triton" else "auto"
        self.norm_in = nn.LayerNorm(config.n_embd) if config.conv_norm_first else nn.Identity()
        self.project = Projection(config.n_embd, 3 * hidden, config.bias)
        self.norm = nn.LayerNorm(hidden)

    def forward(
        self, x: Float[Tensor, "b t d"], tokens: Tokens, hidden: Float[Tensor, "b c"] | None = None
    ) -> tuple[Float[Tensor, "b t c"], Float[Tensor, "b c"]]:
        decay, u, shortcut = self.project(self.norm_in(x)).chunk(3, -1)
        state = self._scan(-F.softplus(decay), upcast(u), tokens, hidden)  # a stream carries float32 on
        unit = F.normalize(F.softplus(upcast(shortcut)), dim=-1)  # in float16 all of a shut one could be 0
        shortcut = unit.to(shortcut.dtype) * shortcut.shape[-1] ** 0.5
        h = F.silu(shortcut) * self.norm(state.to(shortcut.dtype))
        if x.shape[1] == 0:  # no token: the hidden state is what it was, or the sum of nothing, 0
            return h, state.sum(1) if hidden is None else hidden
        return h.to(x.dtype), state[:, -1].clone()

    def _scan(self, log_decay: Tensor, u: Tensor, tokens: Tokens, hidden: Tensor | None) -> Tensor:
        if not self.bidirectional:
            return _masked_scan(log_decay, u, tokens, hidden, self.backend)
        half = u.shape[-1] // 2
        forward = _masked_scan(log_decay[..., :half], u[..., :half], tokens, None, self.backend)
        future = tokens.reversed()
        backward = _masked_scan(log_decay[..., half:].flip(1), u[..., half:].flip(1), future, None, self.backend)
        return torch.cat([forward, backward.flip(1)], -1)


def _masked_scan(log_decay: Tensor, u: Tensor, tokens: Tokens, hidden: Tensor | None, backend: str) -> Tensor:
    if tokens.keep is not None:
        log_decay = log_decay.masked_fill(~tokens.keep[..., None], 0)
        u = u.masked_fill(~tokens.keep[..., None], 0)
    if tokens.start is not None:
        log_decay = log_decay.masked_fill(tokens.start[..., None], float("-inf"))
    return decay_scan(log_decay, u, hidden, backend)
