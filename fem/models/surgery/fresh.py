"""A fresh mixer in the place of an attention of transformers."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn
from transformers.cache_utils import Cache, EncoderDecoderCache

from fem.mixer import FreeEnergyMixer
from fem.models.cache import memory_of
from fem.models.surgery.masks import OTHERWISE, check_mask, tokens_of


class MixerAttention(nn.Module):
    """A FreeEnergyMixer that is called as an attention of transformers.

    hidden_states (B, T, D) -> ((B, T, D), None). Padding and packed documents are read off the original's 4-dimensional
    mask; the state is kept in the original's cache. Raises ValueError on a cache of fixed size, on a mask that holds
    more than these and a window, and on a call that is causal where the mixer is not, or the other way.
    """

    def __init__(self, mixer: FreeEnergyMixer, attention: nn.Module, is_causal: bool):
        super().__init__()
        self.mixer = mixer
        self.is_causal = is_causal  # the original, where a call says nothing
        self.layer_idx = getattr(attention, "layer_idx", None)
        self.resid_dropout = getattr(attention, "resid_dropout", nn.Identity())

    def forward(
        self,
        hidden_states: Float[Tensor, "b t d"],
        attention_mask=None,
        past_key_values: Cache | None = None,
        layer_past: Cache | None = None,
        cache: Cache | None = None,
        is_causal: bool | None = None,
        **kwargs,
    ) -> tuple[Float[Tensor, "b t d"], None]:
        time, causal, keep, segments = hidden_states.shape[1], self.mixer.config.causal, None, None
        past_key_values = next((one for one in (past_key_values, layer_past, cache) if one is not None), None)
        check_mask(attention_mask, time, kwargs)
        if attention_mask is not None:
            keep, segments = tokens_of(attention_mask, time, causal)
        elif time > 1 and (self.is_causal if is_causal is None else is_causal) != causal:
            raise ValueError(
                f"is_causal must be {causal}, as this mixer was built, got {not causal}; {OTHERWISE[causal]}."
            )
        if past_key_values is None:
            return self.resid_dropout(self.mixer(hidden_states, keep, segments)), None
        if isinstance(past_key_values, EncoderDecoderCache):
            past_key_values = past_key_values.self_attention_cache
        memory = memory_of(past_key_values, self.layer_idx)
        segments = None if memory.state is not None else segments
        return self.resid_dropout(memory.read(self.mixer, hidden_states, keep, segments)), None
