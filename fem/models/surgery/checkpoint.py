"""Checkpoints of replaced models: Auto classes load them with their mixers, the original's class refuses them."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from fem.mixer import FreeEnergyMixer
from fem.models.engines.parallel import of_heads
from fem.models.opener import OpensWithFEM
from fem.models.start import start, starts_itself
from fem.models.surgery.graft import apply
from fem.models.surgery.head import FreeEnergyHead

RECORD = "free_energy_mixer"  # the field of a config that holds the calls made on its model
PREFIX = "FEM"
# The name of an attention that nobody registers: every class but ours ends with "Specified attn_implementation=...".
REFUSED = "this folder holds a replaced model"  # as every version begins
REFUSAL = f"{REFUSED}: open it by fem.models.load_replaced"


class ReplacedConfig(OpensWithFEM, PreTrainedConfig):
    """The config.json of a replaced model: the original's fields, and the calls of `replace_attention`.

    `from_dict` returns the original's config, of a subclass that keeps the calls.
    """

    model_type = "fem_replaced"
    auto_map = {"AutoConfig": "ReplacedConfig"}  # noqa: RUF012

    @classmethod
    def from_dict(cls, config_dict: dict, **kwargs) -> PreTrainedConfig | tuple[PreTrainedConfig, dict]:
        original = config_dict.get("original_type", config_dict["model_type"])  # the latter where a part was replaced
        if original not in CONFIG_MAPPING:
            raise ValueError(
                f"the replaced model was of type {original!r}, unknown to transformers; import the package that "
                "registers it, or pass its class: fem.models.load_replaced(folder, architecture=...)."
            )
        return replaced_config(CONFIG_MAPPING[original]).from_dict(config_dict, **kwargs)


class KeepsCalls(OpensWithFEM):
    """Mixed into the original's config class: the same config, saved as a `ReplacedConfig`.

    Its `architectures` begin with the Auto class, as programs look the first name up in transformers.
    """

    original: type[PreTrainedConfig]
    autos: dict[str, str]  # Auto class by class of the original
    auto_map = ReplacedConfig.auto_map

    @classmethod
    def from_dict(cls, config_dict: dict, **kwargs) -> PreTrainedConfig | tuple[PreTrainedConfig, dict]:
        of_the_file = ("model_type", "original_type", "auto_map")
        fields = {name: value for name, value in config_dict.items() if name not in of_the_file}
        return super().from_dict(fields | {"architectures": cls._architectures(config_dict)}, **kwargs)

    def to_diff_dict(self) -> dict:
        saved = super().to_diff_dict()
        return saved | {
            "model_type": ReplacedConfig.model_type,
            "original_type": self.model_type,
            "architectures": self._architectures(saved),
            "attn_implementation": REFUSAL,
        }

    @classmethod
    def _architectures(cls, saved: dict) -> list[str]:
        names = original_names(saved)
        return [*(cls.autos[name] for name in names if name in cls.autos), *names]

    def __reduce__(self) -> tuple:
        return _empty, (self.original,), self.__dict__  # pickle does not find a class that was made at run time


def original_names(saved: dict) -> list[str]:
    """The original's classes by a config.json, where earlier versions wrote them with a prefix."""
    names = saved.get("architectures") or []
    return [name.removeprefix(PREFIX) for name in names if not name.startswith("Auto")]


def _empty(original: type[PreTrainedConfig]) -> PreTrainedConfig:
    return object.__new__(replaced_config(original))


def _of_class(kind: type[PreTrainedConfig], config: PreTrainedConfig) -> PreTrainedConfig:
    """Another config, of this class, with the same fields."""
    other = object.__new__(kind)
    vars(other).update(vars(config))
    return other


@cache
def replaced_config(original: type[PreTrainedConfig]) -> type[PreTrainedConfig]:
    """The original config's subclass that is saved as a `ReplacedConfig`; the Auto classes learn to build from it."""
    members = {"original": original, "autos": {}, "__module__": __name__}
    config = type(PREFIX + original.__name__, (KeepsCalls, original), members)
    for name, auto in vars(modeling_auto).items():
        mapping = getattr(auto, "_model_mapping", None)
        if mapping is None or original not in mapping:
            continue
        known = mapping[original]
        each = known if isinstance(known, tuple) else (known,)
        replaced = tuple(map(replaced_class, each))
        mapping.register(config, replaced if isinstance(known, tuple) else replaced[0], exist_ok=True)
        config.autos.update((architecture.__name__, name) for architecture in each)
    return config


@cache
def replaced_class(architecture: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """A class whose call builds the original and repeats the calls of its config."""

    def build(cls, config, *args, **kwargs):
        original = _of_class(config.original, config)  # parts built through an Auto class are then the original's
        calls = vars(original).pop(RECORD)
        if str(original._attn_implementation).startswith(REFUSED):
            original._attn_implementation = None
        model = architecture(original, *args, **kwargs)
        for call in calls:
            apply(model, **call)
            record(model, call)
        for part in model.modules():  # each starts its own parts
            if isinstance(part, PreTrainedModel):
                part._init_weights = partial(_start, part._init_weights)
        model._tp_plan = _split_by_heads(model)
        return model

    members = {"__new__": build, "__module__": __name__, "config_class": ReplacedConfig}
    return type(architecture.__name__, (architecture,), members)


def _start(theirs: Callable[[nn.Module], None], module: nn.Module) -> None:
    """The original's `_init_weights`, but what replaced its attention starts as `replace_attention` has it."""
    theirs(module)
    if isinstance(module, (FreeEnergyHead, FreeEnergyMixer)):
        for part in reversed(list(module.modules())):  # its own parts first
            if starts_itself(part):
                start(part)


def _split_by_heads(model: PreTrainedModel) -> dict[str, str]:
    """The model's tensor-parallel plan, with the free energy of every attention whose heads it splits."""
    plan = dict(model._tp_plan or {})
    heads = {path: part for path, part in model.named_modules() if isinstance(part, FreeEnergyHead)}
    for path, head in heads.items():
        place = re.sub(r"\.\d+", ".*", path)
        attention = place.removesuffix("free_energy")
        if "rowwise" in {style for name, style in plan.items() if name.startswith(attention)}:  # the output map's
            own = of_heads(head.gate.config)
            plan |= {f"{place}.{name}": style for name, style in own.items()}
    return plan


def record(model: PreTrainedModel, call: dict) -> None:
    """Note a call of `replace_attention` in the model's config, and let that be saved as a `ReplacedConfig`.

    The model gets a config of its own, as others may have been built from the one that it has. A model without a head
    may be a part of one, whose config it shares: that notes the call too, and its folder opens by `load_replaced`.
    """
    shared, is_body = model.config, getattr(model, "base_model", model) is model
    noted = isinstance(shared, KeepsCalls)
    if noted and is_body:
        getattr(shared, RECORD).append(call)  # the whole's list, too
        return
    config = _of_class(type(shared) if noted else replaced_config(type(shared)), shared)
    calls = [*getattr(shared, RECORD, ()), call]
    setattr(config, RECORD, calls)
    for module in model.modules():
        if getattr(module, "config", None) is shared:
            module.config = config
    if is_body:
        vars(shared).update({RECORD: calls, "attn_implementation": REFUSAL})


def load_replaced(
    folder: str | Path, architecture: type[PreTrainedModel] | None = None, **options
) -> PreTrainedModel | tuple[PreTrainedModel, dict]:
    """The model that `save_pretrained` wrote to `folder` after `replace_attention`; options are from_pretrained's, and
    with output_loading_info=True the report of what was loaded is behind the model, as there.

    architecture: the original's class, where transformers and its Auto classes do not know it. The Auto classes open
    such a folder as well; the original's class refuses it. Raises ValueError on a model saved without the free energy,
    and on what is no folder here.
    """
    if not Path(folder).is_dir():
        raise ValueError(f"folder must be a folder, got no such one: {str(folder)!r}; an Auto class opens the hub's.")
    saved, _ = PreTrainedConfig.get_config_dict(folder)
    if not saved.get(RECORD):
        raise ValueError(
            f"folder must hold a model saved after replace_attention, got {str(folder)!r}; use from_pretrained."
        )
    if architecture is not None:
        config = replaced_config(architecture.config_class).from_dict(saved)
        return replaced_class(architecture).from_pretrained(folder, config=config, **options)
    ReplacedConfig.from_dict(saved)  # raises on a type that transformers does not know
    name = next(iter(original_names(saved)), None)
    if name is None or not hasattr(transformers, name):
        told = "config.json names no architecture" if name is None else f"no Auto class knows {name!r}"
        raise ValueError(f"{told}; pass the class: load_replaced(folder, architecture={name or '...'}).")
    return replaced_class(getattr(transformers, name)).from_pretrained(folder, **options)
