"""Language models of other libraries by a model type or a config.json, for `fem train --model`."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from fem.extras import how_to_install
from fem.models.presets import SIZES
from fem.provenance import read_json
from fem.recipes import nearest

if TYPE_CHECKING:
    from fem.train.recipe import TrainRecipe

SHARED = ("hidden_size", "num_hidden_layers")  # sizes that a model type takes from the recipe's preset
LEFT_OUT = ("model_type", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version")
HINT = "its library needs other --model-fields"


def know(model_type: str) -> bool:
    """Whether transformers knows the type, or flash-linear-attention, which registers its own when it is imported."""
    if model_type not in CONFIG_MAPPING:
        with suppress(ImportError):
            import fla.models  # noqa: F401
    return model_type in CONFIG_MAPPING


def other_config(recipe: TrainRecipe, vocabulary: int) -> PreTrainedConfig:
    """The configuration that `recipe.architecture` names, for `vocabulary` tokens and rows of the recipe's context.

    A config.json, or a folder with one, has its own sizes; a model type has its library's, and width and layers of the
    recipe's preset. The recipe's model fields replace any of them. Raises ValueError, in a sentence, on an unknown
    type or field, and where no model can be built.
    """
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
    config_class = CONFIG_MAPPING[model_type]
    if config_class not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(
            f"architecture must be a causal language model, got {model_type!r}, which has none in its library."
        )
    has = _fields(config_class)
    given = recipe.model_fields()
    for field in given:
        if field in ("dtype", "torch_dtype"):
            raise ValueError(f"model_fields must leave the dtype to --dtype, got {given[field]!r}.")
        if field not in has:
            raise ValueError(
                f"model_fields must be fields of {config_class.__name__}, got {field!r}{nearest(field, has)}"
            )
    sizes = SIZES[recipe.preset.rpartition("-")[2]]
    fields: dict[str, Any] = {field: sizes[field] for field in SHARED if field in has and not path.is_file()}
    fields |= {field: value for field, value in stored.items() if field not in LEFT_OUT}
    rows = {"vocab_size": vocabulary, "max_position_embeddings": recipe.context}
    fields |= {field: value for field, value in rows.items() if field in has}
    own = lambda named: {config_class.attribute_map.get(field, field): value for field, value in named.items()}  # noqa: E731
    config = _built(f"the configuration of {model_type!r}", lambda: config_class.from_dict(own(fields) | own(given)))
    _check_sizes(config, recipe, vocabulary)
    with torch.device("meta"):
        _built(f"the model {model_type!r}", lambda: AutoModelForCausalLM.from_config(config))
    return config


def _fields(config_class: type[PreTrainedConfig]) -> set[str]:
    """Names that a configuration of this class has, transformers' general names of sizes among them."""
    own = _built(f"{config_class.__name__} without fields", config_class)
    return {*vars(own), *config_class.attribute_map}


def _check_sizes(config: PreTrainedConfig, recipe: TrainRecipe, vocabulary: int) -> None:
    if config.vocab_size < vocabulary:
        raise ValueError(f"vocab_size must cover the tokenizer's {vocabulary} entries, got {config.vocab_size}.")
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and longest < recipe.context:
        raise ValueError(f"context must be at most max_position_embeddings = {longest}, got {recipe.context}.")


def _built(what: str, build):
    """What `build` returns; its errors, which libraries raise of many classes, as a ValueError in one sentence."""
    try:
        return build()
    except Exception as error:
        said = " ".join(str(error).split())
        raise ValueError(f"{what} cannot be built, {HINT}: {type(error).__name__}: {said}") from error
