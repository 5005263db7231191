"""Small language models for tests: their sizes, weights away from their start, and rows of tokens."""

from __future__ import annotations

import pytest
import torch

from fem import PRIORS
from fem.models import FEMConfig, FEMForCausalLM
from fem.models.presets import TRANSFORMER
from fem.models.surgery.head import FreeEnergyHead

VOCABULARY = 61
HYBRID = ["gla", "softmax", {"prior_type": "softmax", "window": 4}]
MODELS = {prior: {"prior_type": prior} for prior in PRIORS} | {
    "plain_attention": TRANSFORMER,
    "hybrid": {"layer_priors": HYBRID, "num_hidden_layers": 3, "num_key_value_heads": 1},
}
# For promises of the model around the mixers: keys, a state, and both, with a window and without.
every_kind = pytest.mark.parametrize("model", ["softmax", "mamba", "hybrid"], indirect=True)


def small_config(**fields) -> FEMConfig:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    return FEMConfig(**{"vocab_size": VOCABULARY, "max_position_embeddings": 32, **sizes, **fields})


def lively(model: torch.nn.Module, seed: int = 0, size: float = 0.3) -> torch.nn.Module:
    """Move every parameter away from its start, so that a lost one shows; the model in eval mode."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator).mul_(size))
    return model.eval()


def small_model(**fields) -> FEMForCausalLM:
    return lively(FEMForCausalLM(small_config(**fields)))


def tokens(batch: int = 2, time: int = 11, seed: int = 1) -> torch.Tensor:
    """None of them ends a text or fills up a row, of the models in `originals` neither."""
    return torch.randint(1, 59, (batch, time), generator=torch.Generator().manual_seed(seed))


def left_padded(time: int, *lengths: int) -> torch.Tensor:
    """The mask of rows whose last tokens, so many of each, are kept."""
    return (torch.arange(time) >= time - torch.tensor(lengths)[:, None]).long()


def awake(model: torch.nn.Module) -> torch.nn.Module:
    """Replaced attention far from the original: a model that lost its heads would answer otherwise."""
    for head in model.modules():
        if isinstance(head, FreeEnergyHead):
            for parameter in head.parameters():
                torch.nn.init.normal_(parameter, std=0.5)
    return model.eval()
