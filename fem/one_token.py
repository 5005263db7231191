"""One more token of a plain stream on a CPU, in fewer operations than `FreeEnergyMixer.forward` takes.

A generated token costs mostly calls into torch: without this path a softmax layer takes 1.14 instead of 1.01 times
attention's time at 1,000 tokens, and 1.09 at 4,000. Only `forward` knows it.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from fem.call import check_call
from fem.ops.common.tokens import PLAIN
from fem.ops.common.transforms import transformed
from fem.state import CachePosition, MixerState


def fits(layer, x: Tensor, mask: Tensor | None, segment_ids: Tensor | None, state: MixerState | None) -> bool:
    """Whether the call is for one token after a state, without masks, gradients, graphs and transforms, on a CPU."""
    if mask is not None or segment_ids is not None or not isinstance(state, MixerState) or not isinstance(x, Tensor):
        return False
    if torch.is_grad_enabled() or not x.is_cpu or x.ndim != 3 or x.shape[1] != 1 or not x.shape[0]:
        return False
    if torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu") or transformed():
        return False
    return layer.prior.steps(state.memory)


def step(layer, x: Float[Tensor, "b 1 d"], state: MixerState) -> tuple[Float[Tensor, "b 1 d"], MixerState]:
    """The output of the token and the state after it."""
    check_call(layer, x, state, return_state=True)
    before = state.cache_position
    features, hidden = layer.features(x, PLAIN, state.conditioner)
    beta = None if layer.config.value_logexp_cap is None else layer.temperature(x)  # else the memory's beta is enough
    v, free_values = (None if part is None else part[:, 0] for part in layer.values(x, features, beta))
    features = features[:, 0]  # a map takes a matrix of tokens in two operations, (B, T, D) in four
    read, memory = layer.prior.step(features, v, before.position, state.memory, free_values)
    o = layer.gate.mixed(features, read).flatten(-2)
    y = layer.output(layer.dropout(o) if layer.dropout.training else o)
    after = CachePosition(before.position + 1, before.document, before.segment, before.started)
    return y[:, None], MixerState(layer.kind, x.dtype, memory, hidden, after)
