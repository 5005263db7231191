"""Checkpoints of replaced models: Auto classes load them with their mixers, the original's class refuses them."""

from __future__ import annotations

import copyreg
from dataclasses import fields
from functools import cache
from pathlib import Path

import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from fem.models.opener import OpensWithFEM, offer
from fem.models.surgery.graft import apply

RECORD = "free_energy_mixer"  # the field of a config that holds the calls made on its model
PREFIX = "FEM"
REFUSAL = "this folder holds a replaced model: open it by an Auto class after `import fem.models`"


class ReplacedConfig(OpensWithFEM, PreTrainedConfig):
    """What is saved of a replaced model: the original's config, the calls of `replace_attention`, and who opens it.

    `from_dict` returns the original's config, of a subclass that records the calls.
    """

    model_type = "fem_replaced"
    auto_map = {"AutoConfig": "ReplacedConfig"}  # noqa: RUF012

    @classmethod
    def from_dict(cls, config_dict: dict, **kwargs) -> PreTrainedConfig | tuple[PreTrainedConfig, dict]:
        original = config_dict["original_type"]
        if original not in CONFIG_MAPPING:
            raise ValueError(
                f"the replaced model was of type {original!r}, unknown to transformers; import the package that "
                "registers it, or pass its class: fem.models.load_replaced(folder, architecture=...)."
            )
        return replaced_config(CONFIG_MAPPING[original]).from_dict(config_dict, **kwargs)


class RecordsCalls(OpensWithFEM):
    """Mixed into the config of the original: the same config, saved as a `ReplacedConfig`."""

    auto_map = ReplacedConfig.auto_map

    @classmethod
    def get_config_dict(cls, *args, **kwargs) -> tuple[dict, dict]:
        found, rest = super().get_config_dict(*args, **kwargs)
        if found.get("model_type") == ReplacedConfig.model_type:
            found["model_type"] = cls.model_type  # else transformers warns of a model of another type
        return found, rest

    @classmethod
    def from_dict(cls, config_dict: dict, **kwargs) -> PreTrainedConfig | tuple[PreTrainedConfig, dict]:
        if "original" not in config_dict:
            return super().from_dict(config_dict, **kwargs)
        original = config_dict["original"]
        given = {name: value for name, value in config_dict.items() if name.startswith("_")}  # such as _name_or_path
        loaded = super().from_dict(original | given, **kwargs)
        config = loaded[0] if isinstance(loaded, tuple) else loaded
        setattr(config, RECORD, config_dict[RECORD])
        config.architectures = config_dict["architectures"]
        return loaded

    def to_diff_dict(self) -> dict:
        original = super().to_diff_dict()
        architectures = [name.removeprefix(PREFIX) for name in original.get("architectures") or ()]
        calls = original.pop(RECORD, None)
        return {
            "model_type": ReplacedConfig.model_type,
            "architectures": [PREFIX + name for name in architectures],
            "auto_map": original.pop("auto_map"),
            RECORD: calls,
            "transformers_version": original.pop("transformers_version", None),
            # Inside the original's config, its own class would find this type and take the config.
            "original_type": original.pop("model_type"),
            _first_number(type(self).original): REFUSAL,  # whose class asks for a number and shows this text
            "original": original | {"architectures": architectures},
        }


def _first_number(original: type[PreTrainedConfig]) -> str:
    """The original's first field that holds a whole number, such as vocab_size."""
    common = {field.name for field in fields(PreTrainedConfig)}
    numbers = [field.name for field in fields(original) if field.name not in common and field.type in (int, "int")]
    return [*numbers, "hidden_size"][0]  # a composite or a class of its own making may declare none


class ReplacedConfigType(type):
    """The type of configs made by `replaced_config`, so that pickle can find them again."""


copyreg.pickle(ReplacedConfigType, lambda config: (replaced_config, (config.original,)))


@cache
def replaced_config(original: type[PreTrainedConfig]) -> type[PreTrainedConfig]:
    """The original config's subclass that is saved as a `ReplacedConfig`; the Auto classes learn to build from it."""
    if issubclass(original, RecordsCalls):
        return original
    config = ReplacedConfigType(
        PREFIX + original.__name__, (RecordsCalls, original), {"original": original, "__module__": __name__}
    )
    for auto in vars(modeling_auto).values():
        mapping = getattr(auto, "_model_mapping", None)
        if mapping is None or original not in mapping:
            continue
        known = mapping[original]
        replaced = tuple(replaced_class(each, config) for each in (known if isinstance(known, tuple) else (known,)))
        mapping.register(config, replaced if isinstance(known, tuple) else replaced[0], exist_ok=True)
        for each in replaced:
            offer(each)
    return config


@cache
def replaced_class(architecture: type[PreTrainedModel], config: type[PreTrainedConfig]) -> type[PreTrainedModel]:
    """A class that builds the original and repeats the calls of its config; its instances are the original's."""

    def build(self, given, *args, **kwargs):
        given.__class__ = config.original  # parts built through an Auto class are the original's
        try:
            architecture.__init__(self, given, *args, **kwargs)
        finally:
            given.__class__ = config
        for call in getattr(given, RECORD):
            apply(self, **call)
        self.__class__ = architecture

    members = {"__init__": build, "__module__": __name__, "config_class": config}
    return type(PREFIX + architecture.__name__, (architecture,), members)


def load_replaced(
    folder: str | Path, architecture: type[PreTrainedModel] | None = None, **options
) -> PreTrainedModel | tuple[PreTrainedModel, dict]:
    """The model that `save_pretrained` wrote to `folder` after `replace_attention`; options are from_pretrained's, and
    with output_loading_info=True the report of what was loaded is behind the model, as there.

    architecture: the original's class, where transformers and its Auto classes do not know it. The Auto classes open
    such a folder as well; the original's class refuses it. Raises ValueError on a model saved without the free energy.
    """
    saved, _ = PreTrainedConfig.get_config_dict(folder) if Path(folder).is_dir() else ({}, {})
    if not saved.get(RECORD):
        raise ValueError(
            f"folder must hold a model saved after replace_attention, got {str(folder)!r}; use from_pretrained."
        )
    if architecture is None:
        config = replaced_config(type(transformers.AutoConfig.from_pretrained(folder)))
        name = saved["architectures"][0].removeprefix(PREFIX)
        architecture = getattr(transformers, name, None) or getattr(transformers, PREFIX + name, None)
        if architecture is None:
            raise ValueError(
                f"transformers has no class {name!r}; pass it: load_replaced(folder, architecture={name})."
            )
        architecture = next(base for base in architecture.__mro__ if not base.__name__.startswith(PREFIX))
    else:
        config = replaced_config(architecture.config_class)
    return replaced_class(architecture, config).from_pretrained(folder, **options)
