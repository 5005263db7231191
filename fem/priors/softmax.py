"""Softmax attention as a prior."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from fem.config import FreeEnergyMixerConfig
from fem.ops.common.tokens import Tokens
from fem.ops.softmax.cached import cached_read
from fem.ops.softmax.softmax_read import softmax_read
from fem.prior_table import ROWS
from fem.priors.base import Prior
from fem.priors.kv_cache import append, packing_of, within_window
from fem.projection import mapped


class SoftmaxPrior(Prior):
    """p_t(i) = softmax_i(q_t . k_i / sqrt(d_k)), q and k rotated by position.              (Eq. 27, Appendix H.1)

    Its memory is the KV cache, of rotated keys and of [v | e]; with a window, of the tokens that a later row can see.
    """

    name = "softmax"
    uses, widths = ROWS["softmax"].uses, staticmethod(ROWS["softmax"].widths)
    map_names = ("query", "key")

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
        self, features: Float[Tensor, "b t f"] | list[Tensor], position: Tensor
    ) -> tuple[Float[Tensor, "b t h d"], Float[Tensor, "b t hkv d"]]:
        """q and k, rotated by position (T) or (B, T)."""
        width = self.config.key_width
        q, k = (torch.unflatten(x, -1, (-1, width)) for x in mapped(self.maps(), features))
        return self.rotated((q, k), position)

    def read(self, features, v, beta, tokens, memory, free_values=None):
        """A whole sequence by one read; a stream over the cache, to which its tokens are appended first."""
        config = self.config
        q, k = self.queries_and_keys(features, tokens.position)
        options = {"window": config.window, "backend": config.backend}
        if memory is None:
            options["span"] = math.inf if config.value_logexp_cap is None else 2 * config.value_logexp_cap
            return softmax_read(q, k, v, beta, free_values, causal=config.causal, tokens=tokens, **options), None
        memory = append(memory, k, v, beta, tokens, config.window is not None, free_values)
        tokens = Tokens(memory.get("keep"), None, memory.get("document"), None)
        cached = memory["key"], memory["value"], beta, packing_of(memory)
        read = cached_read(q, *cached, split=free_values is not None, tokens=tokens, **options)
        return read, within_window(memory, config.window)
