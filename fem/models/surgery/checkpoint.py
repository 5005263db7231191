"""Checkpoints of replaced models: Auto classes load them with their mixers, the original's class refuses them."""

from __future__ import annotations

from copy import copy
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
# The name of an attention that nobody registers: every class but ours ends with "Specified attn_implementation=...".
REFUSAL = "this folder holds a replaced model: open it by an Auto class after `import fem.models`"


class ReplacedConfig(OpensWithFEM, PreTrainedConfig):
    """The config.json of a replaced model: the original's fields, and the calls of `replace_attention`.

    `from_dict` returns the original's config, of a subclass that keeps the calls.
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


class KeepsCalls(OpensWithFEM):
    """Mixed into the original's config class: the same config, saved as a `ReplacedConfig`."""

    original: type[PreTrainedConfig]
    auto_map = ReplacedConfig.auto_map

    @classmethod
    def from_dict(cls, config_dict: dict, **kwargs) -> PreTrainedConfig | tuple[PreTrainedConfig, dict]:
        of_the_file = ("model_type", "original_type", "auto_map")
        fields = {name: value for name, value in config_dict.items() if name not in of_the_file}
        return super().from_dict(fields, **kwargs)

    def to_diff_dict(self) -> dict:
        saved = super().to_diff_dict()
        names = [PREFIX + name.removeprefix(PREFIX) for name in saved.get("architectures") or ()]
        extra = {"model_type": ReplacedConfig.model_type, "original_type": self.model_type, "architectures": names}
        return saved | extra | {"attn_implementation": REFUSAL}

    def __reduce__(self) -> tuple:
        return _empty, (self.original,), self.__dict__  # pickle does not find a class that was made at run time


def _empty(original: type[PreTrainedConfig]) -> PreTrainedConfig:
    return object.__new__(replaced_config(original))


@cache
def replaced_config(original: type[PreTrainedConfig]) -> type[PreTrainedConfig]:
    """The original config's subclass that is saved as a `ReplacedConfig`; the Auto classes learn to build from it."""
    config = type(PREFIX + original.__name__, (KeepsCalls, original), {"original": original, "__module__": __name__})
    for auto in vars(modeling_auto).values():
        mapping = getattr(auto, "_model_mapping", None)
        if mapping is None or original not in mapping:
            continue
        known = mapping[original]
        replaced = tuple(replaced_class(each) for each in (known if isinstance(known, tuple) else (known,)))
        mapping.register(config, replaced if isinstance(known, tuple) else replaced[0], exist_ok=True)
        for each in replaced:
            offer(each)
    return config


@cache
def replaced_class(architecture: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """A class that builds the original and repeats the calls of its config; its instances are the original's."""

    def build(self, config, *args, **kwargs):
        config = copy(config)
        calls = config.__dict__.pop(RECORD)
        if config._attn_implementation == REFUSAL:
            config._attn_implementation = None
        config.__class__ = config.original  # parts built through an Auto class are the original's
        self.__class__ = architecture  # whose constructor may compare the config's class with its own
        architecture.__init__(self, config, *args, **kwargs)
        for call in calls:
            apply(self, **call)
            record(self, call)

    members = {"__init__": build, "__module__": __name__, "config_class": ReplacedConfig}
    return type(PREFIX + architecture.__name__, (architecture,), members)


def record(model: PreTrainedModel, call: dict) -> None:
    """Note a call of `replace_attention` in the model's config, and let that be saved as a `ReplacedConfig`.

    A model with a head gets a copy of its config, which other models may have been built from. A model without one may
    be a part: its config is the whole's, which will be saved.
    """
    config = model.config
    if getattr(model, "base_model", model) is not model:
        shared, config = config, copy(config)
        for module in model.modules():
            if getattr(module, "config", None) is shared:
                module.config = config
    setattr(config, RECORD, [*getattr(config, RECORD, ()), call])
    if not isinstance(config, KeepsCalls):
        config.__class__ = replaced_config(type(config))


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
    if architecture is not None:
        config = replaced_config(architecture.config_class).from_dict(saved)
        return replaced_class(architecture).from_pretrained(folder, config=config, **options)
    ReplacedConfig.from_dict(saved)  # the classes of this model's type are then known
    name = saved["architectures"][0]
    if not hasattr(transformers, name):
        name = name.removeprefix(PREFIX)
        raise ValueError(f"no Auto class knows {name!r}; pass the class: load_replaced(folder, architecture={name}).")
    return getattr(transformers, name).from_pretrained(folder, **options)
