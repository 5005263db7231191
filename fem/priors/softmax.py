"""Softmax attention as a prior."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from fem.config import FreeEnergyMixerConfig
from fem.ops.common.read import Read
from fem.ops.common.tokens import Tokens
from fem.ops.softmax.decode import packed_step
from fem.ops.softmax.read import cached_read, softmax_read
from fem.prior_table import ROWS
from fem.priors.base import Prior
from fem.priors.kv_cache import PACKED, STREAM, append, append_one, within_window


class SoftmaxPrior(Prior):
    """p_t(i) = softmax_i(q_t . k_i / sqrt(d_k)), q and k rotated by position.              (Eq. 27, Appendix H.1)

    Its memory is the KV cache, of rotated keys and of [v | e]; with a window, of the tokens that a later row can see.
    """

    name = "softmax"
    uses = ROWS["softmax"].uses
    widths = staticmethod(ROWS["softmax"].widths)

    def __init__(self, config: FreeEnergyMixerConfig):
        super().__init__(config)
        self.query = self.project(config.qk_dim)
        self.key = self.project(config.kv_heads * config.key_width)

    @classmethod
    def reads_otherwise(cls) -> bool:
        """Whether a subclass reads its keys and values in a way of its own, which neither an engine's attention nor
        context parallelism knows."""
        return cls.read is not SoftmaxPrior.read

    def check(self, config):
        if not config.normalize:  # of a prior under another name: the configuration knows this one's
            raise ValueError("normalize=False is for scan priors; a softmax prior is normalised by definition.")

    def queries_and_keys(
        self, features: Float[Tensor, "b t f"], position: Tensor
    ) -> tuple[Float[Tensor, "b t h d"], Float[Tensor, "b t hkv d"]]:
        """q and k, rotated by position (T) or (B, T)."""
        config = self.config
        q = torch.unflatten(self.query(features), -1, (-1, config.key_width))
        k = torch.unflatten(self.key(features), -1, (-1, config.key_width))
        return self.rotated((q, k), position)

    def read(self, features, v, beta, tokens, memory):
        config = self.config
        q, k = self.queries_and_keys(features, tokens.position)
        if memory is None:
            how = {"causal": config.causal, "window": config.window, "tokens": tokens, "backend": config.backend}
            span = math.inf if config.value_logexp_cap is None else 2 * config.value_logexp_cap
            return softmax_read(q, k, v, beta, span=span, **how), None
        memory = append(memory, k, v, beta, tokens, with_position=config.window is not None)
        tokens = Tokens(memory.get("keep"), None, memory.get("document"), memory.get("position"))
        start = tuple(memory.get(name) for name in PACKED) if "shift" in memory else None
        how = {"window": config.window, "tokens": tokens, "backend": config.backend}
        read = cached_read(q, memory["key"], memory["value"], beta, start, **how)
        if config.window is not None:
            memory = within_window(memory, config.window)
        return read, memory

    def steps(self, memory):
        plain = memory.keys() == STREAM and memory["value"].dtype != torch.float16  # whose range e would leave
        own = type(self).queries_and_keys is not SoftmaxPrior.queries_and_keys  # scores that `step` does not know
        return plain and not own and self.config.window is None and self.config.backend in ("auto", "sdpa")

    def step(self, features, v, position, memory):
        """e = exp(beta (v - c))        [mean | R] = softmax(q K^T / sqrt(d_k)) [V | E]        F = c + log(R) / beta"""
        width, (batch, kv_heads, channels) = self.config.key_width, v.shape
        q, k = self.query(features), self.key(features)
        heads = q.shape[1] // width
        both = torch.cat([q, k], 1).view(batch, heads + kv_heads, 1, width)
        if self.config.use_rope:
            both = self.turn(position.tolist()[0], width, both.dtype)(both)  # rows without marks stand alike
        q, k = torch.split_with_sizes(both, (heads, kv_heads), 1)
        memory = append_one(memory, k, v.unsqueeze(2))
        q, key, value, shift, beta = q[:, :, 0], memory["key"], memory["value"], memory["shift"], memory["beta"]
        read = packed_step(q, key, value, shift, beta, None, None, width**-0.5)
        if read is None:
            read = Read(*(x[:, 0] for x in cached_read(q[:, None], key, value[..., :channels], beta[0, :, 0])))
        elif v.dtype != read.mean.dtype:
            read = Read(*(x.to(v.dtype) for x in read))
        return read, memory
