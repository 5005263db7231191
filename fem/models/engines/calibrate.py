"""Centre a model's values, so that e = exp(beta (v - c)) fits the range of an engine's cache."""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from fem.mixer import FreeEnergyMixer
from fem.models.arguments import check_language_model
from fem.models.engines.support import obstacle
from fem.ops.softmax.cached import exponents


@torch.no_grad()
def calibrate(model: PreTrainedModel, input_ids: Int[Tensor, "b t"]) -> list[float]:
    """Set the shift c of every channel that reads F to the middle of what it takes on a text; returns the range left.

    That is the largest |beta (f - c)| of each layer in nats, which has to stay below `fem.ops.softmax.cached.REACH` of
    the dtype that serves: 80 in float32 and bfloat16, 9.5 in float16. The shift is saved with the model
    (config.value_shift). Raises ValueError on a model that no engine can serve.
    """
    check_language_model(model)
    reason = obstacle(model.config)
    if reason is not None:
        raise ValueError(f"calibrate is for models that an engine can serve: {reason}")
    seen: list[Tensor] = []
    blocks = model.get_decoder().layers

    def keep(mixer: FreeEnergyMixer, x: Tensor) -> None:
        v, free_values = mixer.values(x, x, mixer.temperature(x))
        seen.append(v if free_values is None else free_values)

    hooks = [
        block.mixer_norm.register_forward_hook(lambda _, args, x, mixer=block.mixer: keep(mixer, x)) for block in blocks
    ]
    try:
        model(input_ids=input_ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    reaches = []
    for block, values in zip(blocks, seen):
        shift = (values.amin((0, 1)) + values.amax((0, 1))) / 2
        block.attention.shift = nn.Parameter(shift, requires_grad=False)
        block.attention.reset_reach()
        beta = block.mixer.temperature(shift)
        reaches.append(0.0 if beta is None else exponents(values, beta, shift).abs().amax().item())
    model.config.value_shift = True
    return reaches
