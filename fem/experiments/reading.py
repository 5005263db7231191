"""Which token does each channel of a head read? A look inside a trained model."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fem.mixer import FreeEnergyMixer
from fem.reading import Reading


class HeadReading(NamedTuple):
    """What one head reads at the last position of a row.

    prior (T,): p(i), the weight of token i in the mean, which all channels share.
    channels (d, T): (1 - lambda_j) p(i) + lambda_j q_j(i) = du_j / dv_ij, its weight in channel j.        (App. M.1)
    """

    layer: int
    head: int
    prior: Float[Tensor, " t"]
    channels: Float[Tensor, "d t"]


@torch.no_grad()
def most_divided_head(model: nn.Module, inputs: Tensor) -> HeadReading:
    """The head of all layers whose channels differ most in what they read at the last position.

    inputs: a batch of one row, as the model takes it: token ids (1, T), say.

    Channels differ by the total variation between a channel's weights and the average channel's.
    """
    heads = [
        HeadReading(layer, head, reading.prior[0, head, -1], weights)
        for layer, reading in enumerate(readings(model, inputs))
        for head, weights in enumerate(_last_weights(reading))
    ]
    return max(heads, key=lambda found: (found.channels - found.channels.mean(0)).abs().sum().item())


def readings(model: nn.Module, inputs: Tensor) -> list[Reading]:
    """`FreeEnergyMixer.inspect` of every mixer of the model, on what the model feeds it from a row of `inputs`."""
    fed: dict[FreeEnergyMixer, Tensor] = {}
    mixers = [module for module in model.modules() if isinstance(module, FreeEnergyMixer)]
    hooks = [mixer.register_forward_pre_hook(lambda mixer, args: fed.update({mixer: args[0]})) for mixer in mixers]
    model.eval()
    try:
        model(inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return [mixer.inspect(fed[mixer]) for mixer in mixers]


def _last_weights(reading: Reading) -> Float[Tensor, "h d t"]:
    prior = reading.prior[0, :, None, -1]
    lam = reading.lambda_[0, -1, :, :, None]
    return (1 - lam) * prior + lam * reading.posterior[0, :, :, -1]
