"""Softmax attention as a prior."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from fem.config import FreeEnergyMixerConfig
from fem.ops.common.read import Read
from fem.ops.common.tokens import PLAIN, Tokens
from fem.ops.softmax.decode import packed_step
from fem.ops.softmax.read import cached_read, softmax_read
from fem.prior_table import ROWS
from fem.priors.base import Prior
from fem.priors.kv_cache import STREAM, append, append_one, in_values, packing_of, within_window


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

    def read(self, features, v, beta, tokens, memory, free_values=None):
        config = self.config
        q, k = self.queries_and_keys(features, tokens.position)
        if memory is None:
            options = {"causal": config.causal, "window": config.window, "tokens": tokens, "backend": config.backend}
            span = math.inf if config.value_logexp_cap is None else 2 * config.value_logexp_cap
            return softmax_read(q, k, v, beta, free_values, span=span, **options), None
        memory = append(memory, k, v, beta, tokens, config.window is not None, free_values)
        tokens = Tokens(memory.get("keep"), None, memory.get("document"), None)
        options = {"window": config.window, "tokens": tokens, "backend": config.backend}
        packing, split = packing_of(memory), free_values is not None
        read = cached_read(q, memory["key"], memory["value"], beta, packing, **options, split=split)
        if config.window is not None:
            memory = within_window(memory, config.window)
        return read, memory

    def steps(self, memory):
        plain = memory.keys() == STREAM and memory["value"].dtype != torch.float16  # whose range e would leave
        replaced = ("read", "queries_and_keys", "rotated")  # by `step`, which knows nothing of a subclass's own
        known = all(getattr(type(self), name) is getattr(SoftmaxPrior, name) for name in replaced)
        started = plain and memory["key"].shape[2] > 0  # a call of no tokens leaves rows that have not begun
        return started and known and self.config.window is None and self.config.backend in ("auto", "sdpa")

    def step(self, features, v, position, memory, free_values=None):
        """e = exp(beta (f - c))        [mean | R] = softmax(q K^T / sqrt(d_k)) [V | E]        F = c + log(R) / beta"""
        width, (batch, kv_heads, _) = self.config.key_width, v.shape
        q, k = self.query(features), self.key(features)
        heads = q.shape[1] // width
        both = torch.cat([q, k], 1).view(batch, heads + kv_heads, 1, width)
        if self.config.use_rope:
            both = self.turn(position.tolist()[0], width, both.dtype)(both)  # rows without marks stand alike
        q, k = torch.split_with_sizes(both, (heads, kv_heads), 1)
        f = None if free_values is None else free_values.unsqueeze(2)
        beta, after = memory["beta"][0, :, 0], append_one(memory, k, v.unsqueeze(2), f)
        if after is None:
            after = append(in_values(memory), k.transpose(1, 2), v.unsqueeze(1), beta, PLAIN, False, f.transpose(1, 2))
        memory, q, scheme = after, q[:, :, 0], packing_of(after)
        read = None if scheme is None else packed_step(q, memory["key"], memory["value"], scheme, None, width**-0.5)
        if read is None:
            read = cached_read(q[:, None], memory["key"], memory["value"], beta, scheme, split=f is not None)
            read = Read(*(x[:, 0] for x in read))
        elif v.dtype != read.mean.dtype:
            read = Read(*(x.to(v.dtype) for x in read))
        return read, memory
