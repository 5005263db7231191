"""The model of a recipe: a preset of FEM, or another library's by a model type or a config.json (`--model`)."""

from __future__ import annotations

import inspect
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from fem.checks import nearest
from fem.extras import how_to_install
from fem.models import FEMConfig, FEMForCausalLM, preset
from fem.models.presets import SIZES
from fem.provenance import read_json
from fem.train.recipe import TrainRecipe

SHARED = ("hidden_size", "num_hidden_layers")  # sizes that a model type takes from the recipe's preset
SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")  # of another vocabulary; the Trainer sets the tokenizer's
LEFT_OUT = ("model_type", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version")


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


def model_config(recipe: TrainRecipe, vocabulary: int) -> PreTrainedConfig:
    """The preset with the recipe's changes, or another library's model, for rows of the recipe's context.

    Raises ValueError, in a sentence, on an unknown type or field, and where no model can be built.
    """
    given = recipe.model_fields()
    for name in ("dtype", "torch_dtype"):
        if name in given:
            raise ValueError(f"model_fields must leave the dtype to --dtype, got {given[name]!r}.")
    if recipe.architecture is None:
        _known("FEMConfig", given, {*inspect.signature(FEMConfig).parameters, "rope_parameters"})
        fields = {"vocab_size": vocabulary, "max_position_embeddings": recipe.context} | given
        config = preset(recipe.preset, mlp=recipe.mlp, **fields)
    else:
        config = _of_another_library(recipe, given, vocabulary)
    if config.vocab_size < vocabulary:
        raise ValueError(f"vocab_size must cover the tokenizer's {vocabulary} entries, got {config.vocab_size}.")
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and 0 < longest < recipe.context:  # XLNet says -1 where there is no longest
        raise ValueError(f"context must be at most max_position_embeddings = {longest}, got {recipe.context}.")
    if recipe.architecture is not None:
        with torch.device("meta"):
            _built(f"the model {config.model_type!r}", lambda: AutoModelForCausalLM.from_config(config))
    return config


def check_causal(architecture: str, model: PreTrainedModel, ids: Tensor) -> None:
    """Raises ValueError where logits change with a later token of `ids` (T,): the loss would be of what is seen."""
    rows = ids[:8].repeat(2, 1).to(model.device)
    rows[1, -1] = (rows[0, -1] + 1) % model.config.vocab_size
    with torch.no_grad():
        one, other = _built(f"the model {architecture!r}", lambda: model.eval()(input_ids=rows).logits[:, :-1])
    if (one - other).abs().max() > 1e-3 * one.abs().max():
        raise ValueError(
            f"architecture must be a causal language model, got {architecture!r}, whose tokens see later ones; some "
            "are causal with --model-fields '{\"is_decoder\": true}'."
        )


def know(model_type: str) -> bool:
    """Whether transformers knows the type, or flash-linear-attention, which registers its own when it is imported."""
    if model_type not in CONFIG_MAPPING:
        with suppress(ImportError):
            import fla.models  # noqa: F401
    return model_type in CONFIG_MAPPING


def _of_another_library(recipe: TrainRecipe, given: dict, vocabulary: int) -> PreTrainedConfig:
    """A config.json, or a folder with one, has its own sizes; a model type has its library's, and width and layers of
    the recipe's preset. The recipe's model fields replace any of them."""
    name = recipe.architecture
    path = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
    stored = read_json(path) if path.is_file() else {"model_type": name}
    model_type = stored.get("model_type") if isinstance(stored, dict) else None
    if not isinstance(model_type, str):
        raise ValueError(f"architecture must be a config.json with a model_type, got {str(path)!r} without one.")
    if not know(model_type):
        raise ValueError(
            f"architecture must be a config.json, a folder with one, or a model type that transformers or "
            f"flash-linear-attention ({how_to_install('baselines')}) knows, got {model_type!r}"
            f"{nearest(model_type, CONFIG_MAPPING)}"
        )
    library = CONFIG_MAPPING[model_type]
    if library not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(
            f"architecture must be a causal language model, got {model_type!r}, which has none in its library."
        )
    known = {*vars(_built(f"{library.__name__} without fields", library)), *library.attribute_map}
    if "vocab_size" not in known:
        raise ValueError(
            f"architecture must be a model of text alone, got {model_type!r}, whose fields have no vocab_size; the "
            f"text part of some has a type of its own, such as {model_type}_text."
        )
    _known(library.__name__, given, known)
    sizes = SIZES[recipe.preset.rpartition("-")[2]]
    fields: dict[str, Any] = {field: sizes[field] for field in SHARED if field in known and not path.is_file()}
    fields |= {field: value for field, value in stored.items() if field not in LEFT_OUT}
    rows = {"vocab_size": vocabulary, "max_position_embeddings": recipe.context} | dict.fromkeys(SPECIAL)
    fields |= {field: value for field, value in rows.items() if field in known}
    own = lambda named: {library.attribute_map.get(field, field): value for field, value in named.items()}  # noqa: E731
    return _built(f"the configuration of {model_type!r}", lambda: library.from_dict(own(fields) | own(given)))


def _known(owner: str, given: dict, known: set[str]) -> None:
    for name in given:
        if name not in known:
            raise ValueError(f"model_fields must be fields of {owner}, got {name!r}{nearest(name, known)}")


def _built(what: str, build):
    """What `build` returns; its errors, which libraries raise of many classes, as a ValueError in one sentence."""
    try:
        return build()
    except Exception as error:
        said = " ".join(str(error).split())
        told = f"{what} cannot be built or run, its library needs other --model-fields: {type(error).__name__}: {said}"
        raise ValueError(told) from error
