"""The cache of a language model, in the form that transformers asks for: one `MixerState` per layer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndStaticFullAttentionLayer,
    StaticLayer,
)
from transformers.generation.continuous_batching import PagedAttentionCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from fem.mixer import FreeEnergyMixer
from fem.state import MixerState

CACHE = "cache" if "cache" in CausalLMOutputWithPast.__annotations__ else "past_key_values"  # until transformers 5.24


class ForgetsNothing:
    """A layer of a cache whose state has read its tokens for good."""

    is_croppable = False

    def crop(self, tokens_to_remove: int) -> None:
        raise ValueError("the state of a FEM layer cannot forget tokens, as assisted decoding asks; leave that out.")


class MixerMemory(ForgetsNothing, CacheLayerMixin):
    """The state of one layer's mixer, and the number of tokens that it has seen, masked ones included."""

    is_sliding = False
    supports_early_init = False

    def __init__(self):
        super().__init__()
        self.reset()

    def reset(self) -> None:
        self.state: MixerState | None = None
        self.tokens: int | Tensor = 0

    def store(self, state: MixerState, tokens: int) -> None:
        if tokens:  # else the state is what it was
            self.state, self.is_initialized = state, True
            self.tokens += tokens

    def __deepcopy__(self, memo: dict) -> MixerMemory:
        return copy.copy(self)  # states are never changed in place, so copies share them

    def get_seq_length(self) -> int | Tensor:
        return self.tokens

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int | Tensor, int]:
        return self.tokens + query_length, 0

    def reorder_cache(self, beam_idx: Int[Tensor, " rows"]) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Int[Tensor, " rows"]) -> None:
        if self.state is not None:
            self.state = self.state.reorder(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.state is not None:
            rows = torch.arange(self.state.batch, device=self.state.device)
            self.batch_select_indices(rows.repeat_interleave(repeats))

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        raise TypeError(
            "this cache holds the states of FEM layers that read exactly, and another kind of layer needs one of its "
            "own; leave out past_key_values and the model makes it."
        )

    lazy_initialization = update

    def read(self, mixer: FreeEnergyMixer, x: Float[Tensor, "b t d"], *marks: Tensor | None) -> Float[Tensor, "b t d"]:
        """mixer(x, *marks), marks (B, T) or None, after the tokens seen so far, which it remembers too."""
        y, state = mixer(x, *marks, state=self.state, return_state=True)
        self.store(state, tokens=y.shape[1])
        return y


class FixedMemory(MixerMemory):
    """A state of fixed size in tensors that keep their addresses, so that a compiled step or a CUDA graph finds them.

    It counts its tokens on the device, as transformers' static layers do.
    """

    is_compileable = True

    def store(self, state: MixerState, tokens: int) -> None:
        if self.state is not None:
            self._overwrite(state)
            self.tokens += tokens
        elif tokens:
            super().store(state.clone(), tokens)
            self.tokens = torch.full((), tokens, device=state.device)
            if not torch.compiler.is_compiling():
                for tensor in (self.tokens, *self.state.tensors()):
                    torch._dynamo.mark_static_address(tensor)

    def _overwrite(self, state: MixerState) -> None:
        for held, new in zip(self.state.tensors(), state.tensors(), strict=True):
            held.copy_(new)

    def reorder_cache(self, beam_idx: Int[Tensor, " rows"]) -> None:
        if self.state is not None:
            self._overwrite(self.state.reorder(beam_idx))

    def __deepcopy__(self, memo: dict) -> FixedMemory:
        copied = FixedMemory()
        copied.store(self.state, int(self.tokens))
        return copied


class KeysBesideState(ForgetsNothing, LinearAttentionAndFullAttentionLayer):
    """transformers' layer of keys and a state, which by itself selects and repeats rows of the keys alone."""

    def batch_select_indices(self, indices: Int[Tensor, " rows"]) -> None:
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_initialized:
            self.reorder_cache(torch.arange(len(self.keys), device=self.device).repeat_interleave(repeats))


class FixedKeysBesideState(ForgetsNothing, LinearAttentionAndStaticFullAttentionLayer):
    """transformers' layer of a static cache's keys and a state."""


def given_cache(past_key_values: Cache | None, cache: Any, keywords: dict) -> Cache | None:
    """The cache of a call, by either of transformers' names for it. Raises ValueError on two.

    Continuous batching's pages are no such cache: they go to the keywords, which an engine's attention reads. What is
    neither is returned, for `tokens_in` to refuse.
    """
    if isinstance(cache, PagedAttentionCache):
        keywords["cache"] = cache
        return past_key_values
    if past_key_values is not None and cache is not None:
        raise ValueError("the cache is given twice, as past_key_values and as cache; leave one out.")
    return cache if past_key_values is None else past_key_values


def memory_of(cache: Cache, layer: int, fixed: bool = False) -> MixerMemory:
    """The memory of a layer's mixer in a cache; it takes the place of an empty layer of a DynamicCache.

    fixed: whether the state has a fixed size, so that an empty layer of a StaticCache will do as well.
    Raises ValueError where the layer is of another kind, or holds keys and values.
    """
    places = {DynamicLayer: MixerMemory, DynamicSlidingWindowLayer: MixerMemory}
    places |= {StaticLayer: FixedMemory} if fixed else {}
    return _placed(cache, layer, places, MixerMemory, "each mixer keeps a state of its own")


def place_beside_keys(cache: Cache, layer: int) -> Float[Tensor, "b c"] | None:
    """The conditioner's state that a layer of an engine's cache holds; None before the first call.

    An empty layer is exchanged for transformers' own that keeps a state beside keys and values, in which
    `cache.update_recurrent_state` then writes. Raises ValueError on another kind of cache.
    """
    fixed = lambda: FixedKeysBesideState(cache.layers[layer].max_cache_len)  # noqa: E731
    places, kinds = {DynamicLayer: KeysBesideState, StaticLayer: fixed}, (KeysBesideState, FixedKeysBesideState)
    held = _placed(cache, layer, places, kinds, "the conditioner keeps a state beside the keys")
    return held.recurrent_states[0]


def _placed(cache: Cache, layer: int, places: dict[type, Callable], wanted, reason: str) -> CacheLayerMixin:
    """A layer of a cache, of a `wanted` kind: an empty one of transformers is exchanged for its entry in `places`."""
    if isinstance(cache, PagedAttentionCache):
        raise ValueError(f"continuous batching keeps pages of keys and values, and {reason}; call generate instead.")
    layers = cache.layers
    if layer == len(layers):
        layers.append(DynamicLayer())
    held = layers[layer]
    if type(held) in places and (not held.is_initialized or held.get_seq_length() == 0):
        held = layers[layer] = places[type(held)]()
    if not isinstance(held, wanted):
        empty = "DynamicCache or StaticCache" if StaticLayer in places else "DynamicCache"
        raise ValueError(
            f"past_key_values must be an empty {empty}, or one that this model has filled, got "
            f"{type(held).__name__} in layer {layer}, as {reason}; leave past_key_values and cache_implementation out "
            "and the model makes one."
        )
    return held


class FEMCache(DynamicCache):
    """The memory of a `FEMModel`, for `past_key_values`: a fixed size for recurrent priors, a KV cache for softmax.

    A call adds its tokens to the cache that it is given; an empty DynamicCache will do as well. copy.deepcopy costs
    nothing: continue a prompt as often as you like.
    """

    def __init__(self, num_layers: int):
        super().__init__()
        self.layers = [MixerMemory() for _ in range(num_layers)]

    @property
    def nbytes(self) -> int:
        """Bytes of all present states."""
        return sum(layer.state.nbytes for layer in self.layers if layer.state is not None)
