"""Models for transformers. Importing this package registers them with the Auto classes."""

from __future__ import annotations

from importlib.util import find_spec

from fem.models.surgery import load_replaced, replace_attention

__all__ = [
    "FEMCache",
    "FEMConfig",
    "FEMForCausalLM",
    "FEMForImageClassification",
    "FEMImageConfig",
    "FEMImageModel",
    "FEMModel",
    "calibrate",
    "load_replaced",
    "preset",
    "replace_attention",
    "write_model_card",
]

if find_spec("transformers"):
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForImageClassification

    from fem.models.cache import FEMCache
    from fem.models.card import write_model_card
    from fem.models.configuration import FEMConfig
    from fem.models.engines.calibrate import calibrate
    from fem.models.modeling import FEMForCausalLM, FEMModel
    from fem.models.presets import preset
    from fem.models.vision import FEMForImageClassification, FEMImageConfig, FEMImageModel

    AutoConfig.register("fem", FEMConfig)
    AutoModel.register(FEMConfig, FEMModel)
    AutoModelForCausalLM.register(FEMConfig, FEMForCausalLM)
    AutoConfig.register("fem_image", FEMImageConfig)
    AutoModel.register(FEMImageConfig, FEMImageModel)
    AutoModelForImageClassification.register(FEMImageConfig, FEMForImageClassification)


def __getattr__(name: str):
    if name == "FEMForecaster":
        if not find_spec("neuralforecast"):
            raise ImportError(
                "fem.models.FEMForecaster needs neuralforecast; install it with "
                "pip install 'free-energy-mixer[forecast]'."
            )
        from fem.models.forecast import FEMForecaster

        return FEMForecaster
    if name in __all__:
        raise ImportError(f"fem.models.{name} needs transformers; install it with pip install 'free-energy-mixer[lm]'.")
    raise AttributeError(f"module 'fem.models' has no attribute {name!r}")
