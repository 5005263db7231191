"""What a language model remembers between two calls: one `MixerState` per layer, as transformers asks for it."""

from __future__ import annotations

import copy

import torch
from jaxtyping import Int
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from fem.state import MixerState


class MixerMemory(CacheLayerMixin):
    """The state of one layer's mixer, and how many tokens, masked ones included, it has been shown."""

    is_sliding = False
    supports_early_init = False

    def __init__(self):
        super().__init__()
        self.reset()

    def reset(self) -> None:
        self.state: MixerState | None = None
        self.tokens = 0

    def remember(self, state: MixerState, tokens: int) -> None:
        self.state = state
        self.tokens += tokens
        self.is_initialized = True

    def __deepcopy__(self, memo: dict) -> MixerMemory:
        return copy.copy(self)  # states are never changed in place, so copies share them

    def get_seq_length(self) -> int:
        return self.tokens

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.tokens + query_length, 0

    def reorder_cache(self, beam_idx: Int[Tensor, " rows"]) -> None:
        if self.state is not None:
            self.state = self.state.reorder(beam_idx)

    def batch_select_indices(self, indices: Int[Tensor, " rows"]) -> None:
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.state is not None:
            rows = torch.arange(self.state.batch, device=self.state.device)
            self.reorder_cache(rows.repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise ValueError(
                f"crop({tokens_to_remove}) would make a recurrent state forget its last tokens, which it cannot; "
                "keep a copy.deepcopy of the cache from before them."
            )

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.update(key_states, value_states)

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        raise TypeError("a FEMCache holds the states of FEM layers; another kind of layer needs a cache of its own.")


class FEMCache(Cache):
    """The memory of a `FEMModel`, for `past_key_values`: a fixed size for recurrent priors, a KV cache for softmax.

    A call adds its tokens to the cache that it is given. copy.deepcopy costs nothing: continue a prompt as often as
    you like.
    """

    def __init__(self, num_layers: int):
        super().__init__(layers=[MixerMemory() for _ in range(num_layers)])

    @property
    def nbytes(self) -> int:
        """Bytes of all states."""
        return sum(layer.state.nbytes for layer in self.layers if layer.state is not None)
