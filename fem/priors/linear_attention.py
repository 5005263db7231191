"""Priors that match queries with keys through a state of fixed size: linear attention and GLA."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from fem.config import FreeEnergyMixerConfig
from fem.ops.common.backend import by_kernels, plain_tensors
from fem.ops.common.precision import upcast
from fem.ops.linear_attention.linear_attention_read import by_kernels_of_fla, linear_attention_read
from fem.ops.linear_attention.linear_log_space import log_decay
from fem.prior_table import ROWS, gla_decay_width
from fem.priors.base import Prior
from fem.projection import mapped


class LinearPrior(Prior):
    """s_t(i) = sum_c phi(q_t)_c exp(sum_{i<r<=t} g_rc) phi(k_i)_c,   phi = ReLU(RoPE(.)) + eps            (Eq. 28)

    Linear attention: keys never decay, g = 0; `GatedLinearPrior` has a g.                              (Appendix H.2)
    """

    name = "linear"
    uses, widths = ROWS["linear"].uses, staticmethod(ROWS["linear"].widths)
    map_names = ("query", "key")

    def __init__(self, config: FreeEnergyMixerConfig):
        super().__init__(config)
        self.query = self.project(config.qk_dim)
        self.key = self.project(config.qk_dim)

    def log_decay(self, *logits: Float[Tensor, "b t _"]) -> Tensor | None:
        """g <= 0 of a third map, per head (B, T, H) or per key channel (B, T, H, d_k); None: no decay."""
        return None

    def read(self, features, v, beta, tokens, memory, free_values=None):
        q, k, *logits = mapped(self.maps(), features)
        q, k = (x.unflatten(-1, (-1, self.config.key_width)) for x in (q, k))
        q, k = self.phi(q, k, tokens.position)
        inputs = (q, k, v, beta, self.log_decay(*logits))
        return self.scan(linear_attention_read, *inputs, tokens=tokens, memory=memory, free_values=free_values)

    def phi(self, q: Float[Tensor, "b t h d"], k: Float[Tensor, "b t h d"], position: Tensor) -> tuple[Tensor, Tensor]:
        """The features of queries and keys: in float32, or rounded to bfloat16 where kernels multiply them so."""
        config = self.config
        rounds = q.dtype == torch.bfloat16 and q.shape[1] > 1 and by_kernels_of_fla(config.backend, q)
        if rounds and plain_tensors(q, k) and not torch.compiler.is_compiling():
            from fem.ops.linear_attention.feature_kernels import features  # by Triton, which is not required

            frequency = self._frequency(config.key_width, q.device) if config.use_rope else None
            return features(q, k, position, frequency, config.rope_factor, config.eps)
        if not rounds and config.use_rope and by_kernels(q, k):
            from fem.ops.common.token_kernels import rotated_tokens  # by Triton, too

            turn = position, self._frequency(config.key_width, q.device), config.rope_factor
            return tuple(rotated_tokens((q, k), *turn, config.eps))
        q, k = (F.relu(x) + config.eps for x in self.rotated((upcast(q), upcast(k)), position))
        return (q.bfloat16(), k.bfloat16()) if rounds else (q, k)


class GatedLinearPrior(LinearPrior):
    """GLA: g = logsigmoid(W x + b) / 16, one per token ("scalar"), head ("head") or key channel ("channel").

    A new layer starts with g = log(1/2) / 16: half of a memory is gone after 16 tokens.                (Appendix H.2)
    """

    name = "gla"
    uses, widths = ROWS["gla"].uses, staticmethod(ROWS["gla"].widths)
    map_names = ("query", "key", "decay")

    def __init__(self, config: FreeEnergyMixerConfig):
        super().__init__(config)
        self.decay = self.project(gla_decay_width(config))

    def log_decay(self, logits):
        decay = log_decay(logits)
        if self.config.decay == "channel":
            return decay.unflatten(-1, (-1, self.config.key_width))
        return decay.expand(-1, -1, self.config.n_head) if self.config.decay == "scalar" else decay
