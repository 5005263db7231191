"""One call of a layer: what comes in is checked and masked, what goes out is joined by the state."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from fem.arguments import check_flags
from fem.ops.common.backend import exporting, transformed
from fem.ops.common.kept_first import Order, kept_first
from fem.ops.common.tokens import Tokens, read_tokens, whole_rows
from fem.projection import check_tokens
from fem.state import CachePosition, MixerState

HINTS = {
    "key_padding_mask": "attention_mask, whose True means keep: pass ~key_padding_mask",
    "attn_mask": "attention_mask for padding, causal and window of the configuration for the rest",
    "is_causal": "causal of the configuration",
    "cu_seqlens": "segment_ids, the number of each token's document",
    "memory": "FreeEnergyCrossMixer, which reads a memory",
    **dict.fromkeys(("bias", "attn_bias"), "fem.functional.softmax_read, which adds a bias to its scores"),
}


def unknown_argument(name: str, *_) -> TypeError:
    """The error for an argument that other attention layers take under this name."""
    hint = f"use {HINTS[name]}." if name in HINTS else "it takes attention_mask, segment_ids, state and return_state."
    return TypeError(f"the layer's call has no argument {name!r}; {hint}")


class Call(NamedTuple):
    """A layer's input, its tokens, and what the call before left behind.

    x: as it came; with 0 for masked tokens once `masked` or `kept_first` was called.
    order: None, or how the tokens stand, where the kept ones come first.
    """

    x: Float[Tensor, "b t d"]
    tokens: Tokens
    memory: dict[str, Tensor] | None  # of the prior; {} at the start of a sequence, None where no state is kept
    hidden: Float[Tensor, "b c"] | None  # of the conditioner
    position: CachePosition | None  # after the call; None where no state is returned
    kind: str  # of the layer, as its states name it
    return_state: bool
    order: Order | None = None

    @classmethod
    def open(cls, layer, x, attention_mask, segment_ids, state: MixerState | None, return_state: bool) -> Call:
        check_call(layer, x, state, return_state)
        memory, hidden, before = {} if return_state else None, None, None
        if state is not None:
            memory, hidden, before = state.memory, state.conditioner, state.cache_position
        marks = tuple(x.shape[:2]), x.device, attention_mask, segment_ids
        tokens, position = (whole_rows(*marks), None) if memory is None else read_tokens(*marks, before)
        return cls(x, tokens, memory, hidden, position, layer.kind, return_state)

    def masked(self) -> Call:
        """The call with 0 for masked tokens."""
        return self._replace(x=self.tokens.zero_masked(self.x))

    def kept_first(self, config) -> Call:
        """`masked`, and where the layer is causal, has no window and keeps no state, in an order that needs no mask."""
        tokens, x = self.tokens, self.x
        if tokens.keep is None or self.memory is not None or not config.causal or config.window is not None:
            return self.masked()
        if exporting() or transformed():  # which know no autograd function of ours
            return self.masked()
        tokens, order = kept_first(tokens.keep, tokens.document)
        return self._replace(x=order.kept_first(x), tokens=tokens, order=order)

    def in_order(self, o: Float[Tensor, "b t h d"]) -> Float[Tensor, "b t h d"]:
        """The mixed reads in the order of the layer's input; of masked tokens 0, where that is another one."""
        return o if self.order is None else self.order.as_before(o)

    def close(self, y: Tensor, memory: dict[str, Tensor] | None, hidden: Tensor | None):
        """y, or with return_state y and the state after the call."""
        if not self.return_state:
            return y
        state = MixerState(self.kind, self.x.dtype, memory, hidden, self.position)
        if self.x.shape[1] == 1 or transformed():  # the activations of one token keep little memory alive
            return y, state
        return y, state.compact()


def check_call(layer, x: Tensor, state: MixerState | None, return_state: bool) -> None:
    """Raise unless x fits the layer and the state, if any, is one of its own for these rows."""
    config = layer.config
    check_tokens("x", x, f"(batch, time, n_embd = {config.n_embd})", config.n_embd, layer.value)
    check_flags(return_state=return_state)
    if state is not None and not isinstance(state, MixerState):
        raise TypeError(f"state must be a MixerState that this layer returned, got a {type(state).__name__}.")
    if not config.causal and (state is not None or return_state):
        raise ValueError(
            "a state continues a causal sequence; this layer has causal=False: leave out state and return_state."
        )
    if state is not None:
        state.check(layer.kind, x)
