"""Models for transformers. Importing this package registers them with the Auto classes."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec

from fem.extras import how_to_install
from fem.models.surgery.replace import replace_attention

__all__ = [
    "LORA",
    "FEMCache",
    "FEMConfig",
    "FEMForCausalLM",
    "FEMForImageClassification",
    "FEMForQuestionAnswering",
    "FEMForSequenceClassification",
    "FEMForTokenClassification",
    "FEMImageConfig",
    "FEMImageModel",
    "FEMModel",
    "ReplacedConfig",
    "load_replaced",
    "preset",
    "replace_attention",
]

if find_spec("transformers"):
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from fem.models.cache import FEMCache
    from fem.models.configuration import FEMConfig
    from fem.models.heads import FEMForQuestionAnswering, FEMForSequenceClassification, FEMForTokenClassification
    from fem.models.modeling import LORA, FEMForCausalLM, FEMModel
    from fem.models.presets import preset
    from fem.models.surgery.checkpoint import ReplacedConfig, load_replaced
    from fem.models.vision import FEMForImageClassification, FEMImageConfig, FEMImageModel

    for config in (FEMConfig, FEMImageConfig, ReplacedConfig):
        transformers.AutoConfig.register(config.model_type, config)
        for auto, name in config.auto_map.items():
            if auto != "AutoConfig":
                getattr(transformers, auto).register(config, globals()[name])
                # Where `transformers serve` 5.24 looks it up. A replaced model's config names an Auto class first; in
                # ours vLLM 0.32 would take that for a model. On the module's type, as programs may hold two of them.
                setattr(type(transformers), name, globals()[name])
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[FEMConfig.model_type] = FEMForCausalLM.__name__  # whose labels the Trainer shifts

if hasattr(sys.modules.get("neuralforecast"), "NeuralForecast"):  # not while it is being imported itself
    import_module("fem.models.forecast")  # NeuralForecast.load then knows the forecaster


def __getattr__(name: str):
    if name == "FEMForecaster":
        if not find_spec("neuralforecast"):
            raise ImportError(f"fem.models.{name} needs neuralforecast; {how_to_install('forecast')}.")
        return import_module("fem.models.forecast").FEMForecaster
    if name in __all__:
        raise ImportError(f"fem.models.{name} needs transformers; {how_to_install('lm')}.")
    raise AttributeError(f"module 'fem.models' has no attribute {name!r}")
