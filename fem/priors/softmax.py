"""Softmax attention as a prior."""

from __future__ import annotations

import torch
from torch import Tensor

from fem.config import FreeEnergyMixerConfig, Widths
from fem.ops.rope import rotate
from fem.ops.softmax import softmax_read
from fem.ops.tokens import Tokens
from fem.priors.base import Prior


class SoftmaxPrior(Prior):
    """p_t(i) = softmax_i(q_t . k_i / sqrt(d_k)), q and k rotated by position.              (Eq. 27, Appendix H.1)

    Its memory is the KV cache: rotated keys and values, and, only once a call brought them, the mask, document and
    position of each cached token. With a window it keeps the tokens that a later row can still see.
    """

    name = "softmax"

    def __init__(self, config: FreeEnergyMixerConfig):
        super().__init__(config)
        self.query = self.project(config.qk_dim)
        self.key = self.project(config.kv_heads * config.key_width)

    @staticmethod
    def widths(config: FreeEnergyMixerConfig) -> Widths:
        return Widths(config.n_embd * (config.qk_dim + config.kv_heads * config.key_width), key_maps=2)

    def read(self, features, v, beta, tokens, memory):
        config = self.config
        q = self.query(features).unflatten(-1, (config.n_head, -1))
        k = self.key(features).unflatten(-1, (config.kv_heads, -1))
        if config.use_rope:
            q = rotate(q, tokens.position, config.rope_theta)
            k = rotate(k, tokens.position, config.rope_theta)
        if memory is not None:
            memory = self._append(memory, k, v, tokens)
            k, v = memory["key"], memory["value"]
            tokens = Tokens(memory.get("keep"), None, memory.get("document"), memory.get("position"))
        read = softmax_read(
            q, k, v, beta, causal=config.causal, window=config.window, tokens=tokens, backend=config.backend
        )
        if memory is not None and config.window is not None:
            memory = self._within_window(memory)
        return read, memory

    def _append(self, memory: dict[str, Tensor], k: Tensor, v: Tensor, tokens: Tokens) -> dict[str, Tensor]:
        rows, new = k.shape[:2]
        ones = k.new_ones(rows, 1, dtype=torch.bool)
        zeros = k.new_zeros(rows, 1, dtype=torch.long)
        incoming = {"key": k, "value": v}
        if "keep" in memory or tokens.keep is not None:
            incoming["keep"] = ones.expand(-1, new) if tokens.keep is None else tokens.keep
        if "document" in memory or tokens.start is not None:
            incoming["document"] = zeros.expand(-1, new) if tokens.document is None else tokens.document
        if self.config.window is not None:
            incoming["position"] = tokens.position.expand(rows, -1)
        if not memory:
            return incoming
        old = memory["key"].shape[1]
        plain = {"keep": ones.expand(-1, old), "document": zeros.expand(-1, old)}
        return {name: torch.cat([memory.get(name, plain.get(name)), value], 1) for name, value in incoming.items()}

    def _within_window(self, memory: dict[str, Tensor]) -> dict[str, Tensor]:
        """The last `window - 1` kept tokens of every row, in order: all that a next token can see."""
        old = memory["key"].shape[1]
        room = min(self.config.window - 1, old)
        if "keep" not in memory:
            return {name: tensor[:, old - room :] for name, tensor in memory.items()}
        kept_last = memory["keep"].long().argsort(dim=1, stable=True)[:, old - room :]
        rows = torch.arange(len(kept_last), device=kept_last.device)[:, None]
        return {name: tensor[rows, kept_last] for name, tensor in memory.items()}
