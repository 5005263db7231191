"""Tables of what each channel of each head of a trained model reads."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from fem.inspection import Reading
from fem.mixer import FreeEnergyMixer


def readers(model: nn.Module) -> dict[nn.Module, str]:
    """Every part of the model that reads a free energy, with the name of its prior."""
    from fem.models.surgery.head import FreeEnergyHead

    parts = {}
    for module in model.modules():
        if isinstance(module, FreeEnergyMixer):
            parts[module] = module.prior.name
        elif isinstance(module, FreeEnergyHead):
            parts[module] = "softmax"
    return parts


@torch.no_grad()
def readings(model: nn.Module, inputs: Tensor) -> list[Reading]:
    """`inspect` of every reader of the model, on what the model feeds it from a row of `inputs`."""
    fed: dict[nn.Module, tuple[tuple, dict]] = {}
    parts = readers(model)
    keep = lambda part, args, kwargs: fed.update({part: (args, kwargs)})  # noqa: E731
    model.eval()
    with ExitStack() as undo:
        for part in parts:
            undo.enter_context(part.register_forward_pre_hook(keep, with_kwargs=True))
        model(inputs)
    return [
        part.inspect(args[0]) if isinstance(part, FreeEnergyMixer) else part.inspect(*args, **kwargs)
        for part, (args, kwargs) in ((part, fed[part]) for part in parts)
    ]


@dataclass(frozen=True)
class LayerTables:
    """One layer's read, row t along the second last axis of weights, tokens i along the last.

        read_tj(i) = (1 - lambda_tj) p_t(i) + lambda_tj q_tj(i) = du_tj / dv_ij                             (App. M.1)
        gap_tj = beta_j (F_tj - mean_tj) = KL(p_t || q_tj)                                                     (Eq. 6)
        prior_tokens = exp(-sum_i p_t(i) log p_t(i)), posterior_tokens the same of q: effective numbers of tokens

    prior: (H, 1, T, T), or (H, d_v, T, T) where every channel has its own; posterior and read: (H, d_v, T, T). All
    else is (H, d_v, T), beta (H, d_v), prior_tokens as prior. Parts that the layer lacks are None. An unnormalised
    prior is shown normalised, and so is its gap. Of split values the channels are those that read a free energy.
    """

    layer: int
    prior_type: str
    prior: np.ndarray
    posterior: np.ndarray | None
    read: np.ndarray
    prior_tokens: np.ndarray
    posterior_tokens: np.ndarray | None
    lambda_: np.ndarray | None
    hidden_beta: np.ndarray | None
    beta: np.ndarray | None
    gate: np.ndarray | None
    gap: np.ndarray | None

    @property
    def heads(self) -> int:
        return self.read.shape[0]


def layer_tables(layer: int, prior_type: str, reading: Reading) -> LayerTables:
    """The tables of the first row of a reading.

    Raises ValueError if the layer computed NaN or infinity, or reads an attention sink, which is no token.
    """
    if not bool(reading.mean.isfinite().all()):
        raise ValueError(f"model must compute finite numbers, but layer {layer} reads NaN or infinity.")
    scores = _numpy(reading.prior)
    if scores.shape[-1] != scores.shape[-2]:
        raise ValueError(f"model must read only tokens, but layer {layer} also reads an attention sink.")
    scores = scores[:, None] if scores.ndim == 3 else scores
    total = scores.sum(-1)
    prior = scores / np.where(total > 0, total, 1)[..., None]
    posterior = None if reading.posterior is None else _numpy(reading.posterior)
    lambda_, gate, hidden = (_by_head(part) for part in (reading.lambda_, reading.gate, reading.hidden_beta))
    beta = None
    if posterior is None:
        read = np.broadcast_to(prior, (prior.shape[0], reading.mean.shape[-1], *prior.shape[2:]))
    else:
        share = 1.0 if lambda_ is None else lambda_[..., None]
        free_channels = slice(-posterior.shape[1], None)  # of split values those channels that read a free energy
        prior, gate = prior[:, free_channels], None if gate is None else gate[:, free_channels]
        read = (1 - share) * prior + share * posterior
        beta = np.broadcast_to(reading.beta.double().cpu().numpy().reshape(len(read), -1), read.shape[:2])
    tokens = effective_tokens(prior), None if posterior is None else effective_tokens(posterior)
    gates = lambda_, hidden, beta, gate, _by_head(reading.gap)
    return LayerTables(layer, prior_type, prior, posterior, read, *tokens, *gates)


def effective_tokens(p: np.ndarray) -> np.ndarray:
    """exp(-sum_i p(i) log p(i)): 1 where p sits on one token, T where it is even, 0 where it is empty."""
    entropy = -(p * np.log(np.where(p > 0, p, 1))).sum(-1)
    return np.where(p.any(-1), np.exp(entropy), 0)


def _numpy(table: Tensor) -> np.ndarray:
    return table[0].double().cpu().numpy()


def _by_head(part: Float[Tensor, "b t h d"] | None) -> np.ndarray | None:
    return None if part is None else _numpy(part.permute(0, 2, 3, 1))


def by_division(layers: Sequence[LayerTables]) -> list[tuple[int, int]]:
    """All heads, as (index of layer, index of head), those whose channels differ most at the last token first."""
    places = [(i, head) for i, tables in enumerate(layers) for head in range(tables.heads)]
    return sorted(places, key=lambda pair: division(layers[pair[0]].read[pair[1], :, -1]), reverse=True)


def division(weights: np.ndarray) -> tuple[int, float]:
    """Difference of channels (d, T): the number of different tokens that they read most, then the sum of the absolute
    differences between their weights and the average channel's.
    """
    return len(set(weights.argmax(-1).tolist())), float(np.abs(weights - weights.mean(0)).sum())
