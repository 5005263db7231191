"""A new language model whose start depends only on a seed."""

from __future__ import annotations

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from fem.models import FEMConfig, FEMForCausalLM


def build_model(config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    """A new model. With the same seed and vocabulary, all mixers start from the same embeddings; a model of another
    library starts as it does there."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if not isinstance(config, FEMConfig):
            return AutoModelForCausalLM.from_config(config)
        model = FEMForCausalLM(config)
    embeddings, generator = model.get_input_embeddings().weight, torch.Generator().manual_seed(seed)
    nn.init.normal_(embeddings, std=config.initializer_range, generator=generator)
    return model
