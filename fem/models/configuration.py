"""The configuration of a FEM language model, as transformers stores it."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import no_type_check

import torch
from transformers import LlamaConfig, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from fem.arguments import check_flags
from fem.checks import finite_number, positive_int, unknown_field
from fem.config import MIXER_FIELDS, FreeEnergyMixerConfig, build_config
from fem.models.engines.obstacles import attends, layer_type, obstacle_to_pages
from fem.models.engines.parallel import tensor_plan
from fem.models.opener import OpensWithFEM
from fem.prior_table import PRIORS, ROTARY

ATTENTION_NAMES = {"sliding_window": "window", "attention_dropout": "dropout"}  # as other models' configs have them
MODEL_NAMES = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_kv_head": "num_key_value_heads",
    "prior_type": "prior_type",
    **dict.fromkeys(ROTARY, "rope_parameters"),
}
ROPE_KINDS = ("linear", "yarn", "llama3", "proportional")  # not those whose angles change with the length of a row
BUILT: dict[tuple, FreeEnergyMixerConfig] = {}  # mixers by all that decides one, as their widths take a search
SIZES = {  # the fields that are positive integers, and what may stand in their place
    **dict.fromkeys(("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"), ()),
    "num_key_value_heads": (None,),
    "intermediate_size": (None,),
    "max_position_embeddings": (None, "auto"),
}


class CheckedConfig(OpensWithFEM):
    """Mixed into a config: its fields are checked wherever they are given, and unknown ones are refused."""

    @classmethod
    def own_fields(cls) -> list[str]:
        """The fields that not every config of transformers has."""
        common = {field.name for field in fields(PreTrainedConfig)}
        return [field.name for field in fields(cls) if field.name not in common]

    @classmethod
    def from_dict(cls, config_dict: dict, **kwargs) -> PreTrainedConfig | tuple[PreTrainedConfig, dict]:
        """The config of a dict; fields among kwargs, those of from_pretrained, are read as the constructor's are."""
        given = {name: kwargs.pop(name) for name in cls.own_fields() if name in kwargs}
        return super().from_dict(config_dict | given, **kwargs)

    def refuse_unknown(self, values: dict) -> None:
        """Raise TypeError on a field that no class of the configuration has: transformers would keep it unread.

        What was read from a file, with model_type beside it, may hold what other programs wrote there.
        """
        if not values or "model_type" in values:
            return
        kept = vars(PreTrainedConfig(**values))
        unknown = [name for name in values if name in kept]
        if unknown:
            raise unknown_field(type(self).__name__, unknown[0], values[unknown[0]], self.own_fields())

    def check_sizes(self, sizes: dict[str, tuple], numbers: tuple[str, ...]) -> None:
        """Raise unless sizes and numbers are some, heads divide the width, and `mixer` is a dict, which is copied."""
        for name, others in sizes.items():
            if getattr(self, name) not in others:
                positive_int(name, getattr(self, name), others)
        for name in numbers:
            finite_number(name, getattr(self, name), 0.0, math.inf)
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"num_attention_heads must divide hidden_size = {self.hidden_size}, got {self.num_attention_heads}."
            )
        if not isinstance(self.mixer or {}, dict):
            raise TypeError(f"mixer must be a dict of mixer fields, got {self.mixer!r}.")
        self.mixer = dict(self.mixer or {})


@no_type_check  # the tests' shape checks take a constructor's arguments from the fields, but transformers' has more
class FEMConfig(CheckedConfig, PreTrainedConfig):
    """Sizes and mixers of a `FEMForCausalLM`: pre-norm blocks of a Free Energy Mixer and a SwiGLU.

    num_key_value_heads: key heads of the softmax layers, or None for as many as there are query heads.
    intermediate_size: width of the SwiGLU, or None for 8/3 of hidden_size, rounded up to a multiple of 256.
    max_position_embeddings: the length that the model is for, which engines and scaled angles ask for; None: any.
    "auto": 4096 with a softmax layer, None for priors whose state does not grow.
    prior_type: the prior of every layer, a key of `fem.PRIORS`. layer_priors: one entry per layer instead, a name
    or a dict of mixer fields, for hybrids such as 3 * ["gla"] + [{"prior_type": "softmax", "window": 512}].
    mixer: fields of `FreeEnergyMixerConfig` that all layers share, such as {"use_conv": False}; one that not every
    prior reads, such as ssm_rank, goes to the layers whose prior does.
    initializer_range: deviation of embeddings and MLPs at the start; a mixer's maps have .02 (`fem.projection`).
    rope_parameters: scaled rotary angles, in transformers' words, such as {"rope_type": "yarn", "factor": 4.0,
    "original_max_position_embeddings": 4096}, by its own functions: linear, yarn, llama3, proportional.
    A layer has the linear weights of plain attention (`FreeEnergyMixerConfig.matched`), unless its fields name a
    width: fem_dim, fem_ratio, qk_dim or p_t_to_fem_ratio.

    Raises ValueError on sizes that no model can have and on fields given in two places, TypeError on flags that are
    none and on unknown fields, its own and the mixers'.
    """

    model_type = "fem"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]  # noqa: RUF012  (the name and the type are transformers')
    auto_map = {  # noqa: RUF012
        "AutoConfig": "FEMConfig",
        "AutoModel": "FEMModel",
        "AutoModelForCausalLM": "FEMForCausalLM",
        "AutoModelForSequenceClassification": "FEMForSequenceClassification",
        "AutoModelForTokenClassification": "FEMForTokenClassification",
        "AutoModelForQuestionAnswering": "FEMForQuestionAnswering",
    }

    vocab_size: int = 32000
    hidden_size: int = 1024
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    num_key_value_heads: int | None = None
    intermediate_size: int | None = None
    max_position_embeddings: int | str | None = "auto"
    prior_type: str = "softmax"
    layer_priors: list | None = None
    mixer: dict | None = None
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    use_cache: bool = True
    tie_word_embeddings: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list | None = None

    def __post_init__(self, **values):
        values.pop("auto_map", None)  # the class knows it
        if "recipe" in values:
            raise ValueError(
                "this folder was written by fem train and is no model: open one of the folders checkpoint-N in it."
            )
        rope = values.pop("rope_parameters", None)
        if values.pop("rope_scaling", None) is not None:
            raise TypeError("FEMConfig has no field 'rope_scaling'; pass rope_parameters, with a rope_type.")
        typed = "model_type" not in values  # else read from a file, in which other programs may have written
        for name in values:
            field = ATTENTION_NAMES.get(name, name) if typed else name
            if field in MIXER_FIELDS:
                remedy = MODEL_NAMES.get(name, f"mixer={{{field!r}: {values[name]!r}}}")
                raise ValueError(f"FEMConfig has no field {name!r}, which belongs to the mixers; pass {remedy}.")
        self.refuse_unknown(values)
        self._check_sizes()
        self._read_rope(rope)
        if self.intermediate_size is None:
            self.intermediate_size = 256 * -(-8 * self.hidden_size // (3 * 256))
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        keep_keys = any("n_kv_head" in _uses(fields) for fields in self._own_fields())
        if self.max_position_embeddings == "auto":
            self.max_position_embeddings = 4096 if keep_keys else None
        mixers = self.mixer_configs()  # raises on what no layer can have
        if (rope := self._scaling) and all(mixer.rope_frequencies is None for mixer in mixers):
            raise ValueError(
                f"rope_parameters needs a layer with rotary positions, use_rope=True and a prior that has them; got "
                f"{rope!r} without one."
            )
        if self._grouped and not keep_keys:
            raise ValueError(f"num_key_value_heads needs a softmax layer, got {self.num_key_value_heads} without one.")
        self.base_model_tp_plan = tensor_plan(self)
        super().__post_init__(**values)

    @classmethod
    def own_fields(cls) -> list[str]:
        """With rope_parameters, which is no declared field: transformers takes all that have it for scaled ones."""
        return [*super().own_fields(), "rope_parameters"]

    def convert_rope_params_to_dict(self, **values) -> dict:
        return values  # `_read_rope` did

    def mixer_configs(self) -> list[FreeEnergyMixerConfig]:
        """The configuration of every layer's mixer, in order."""
        sizes, built = (self.hidden_size, self.num_attention_heads, self.max_position_embeddings, self._scaling), []
        for layer in self._layer_fields():
            decided_by = PRIORS.get(str(layer["prior_type"])), repr((layer, sizes))
            if decided_by not in BUILT:
                BUILT[decided_by] = self._build(layer)
            built.append(BUILT[decided_by])
        return built

    def _layer_fields(self) -> list[dict]:
        """Each layer's own fields, and the shared ones, without those that only the priors of other layers read."""
        layers, rope = self._own_fields(), getattr(self, "rope_parameters", None)
        shared = self.mixer | ({"rope_theta": rope["rope_theta"]} if rope else {})
        shared |= {"n_kv_head": self.num_key_value_heads} if self._grouped else {}
        somewhere = {"n_kv_head"}.union(*map(_uses, layers))
        return [
            {name: value for name, value in shared.items() if name not in somewhere - _uses(own)} | own
            for own in layers
        ]

    def _own_fields(self) -> list[dict]:
        entries = self.layer_priors or [{}] * self.num_hidden_layers
        return [
            {"prior_type": entry} if isinstance(entry, str) else {"prior_type": self.prior_type} | entry
            for entry in entries
        ]

    # What engines ask of a configuration, under their names.

    @property
    def head_dim(self) -> int:
        """Width of a head in an engine's cache, where keys and values have the same.

        It is that of the keys, attention's own, where what is read is no wider: in the paper's shape, 2 d_v = d_k, and
        of split values, d_v <= d_k. Wider reads are rounded up to a multiple of 32.
        """
        mixers = self.mixer_configs()
        key, read = (max(getattr(mixer, name) for mixer in mixers) for name in ("key_width", "read_width"))
        return key if read <= key else -(-read // 32) * 32

    @property
    def layer_types(self) -> list[str] | None:
        return None if obstacle_to_pages(self) else [layer_type(mixer) for mixer in self.mixer_configs()]

    @property
    def layers_block_type(self) -> list[str]:
        """vLLM's words for layers that keep keys and values, and for those that keep only a state."""
        return ["attention" if attends(mixer) else "mamba" for mixer in self.mixer_configs()]

    @property
    def sliding_window(self) -> int | None:
        return next((mixer.window for mixer in self.mixer_configs() if mixer.window is not None), None)

    @property
    def _grouped(self) -> bool:
        return self.num_key_value_heads != self.num_attention_heads

    @property
    def _scaling(self) -> dict | None:
        """The rope_parameters that scale angles; None where there are none, or a rope_theta alone."""
        rope = getattr(self, "rope_parameters", None)
        return rope if rope and rope["rope_type"] != "default" else None

    def _read_rope(self, given: dict | None) -> None:
        """Set rope_parameters, in the words of transformers, where some are given.

        Raises ValueError on a kind of scaling that is unknown, on a rope_theta that differs from the mixers', and on
        what nothing reads.
        """
        if not given:
            return
        if not isinstance(given, dict):
            raise TypeError(f"rope_parameters must be a dict, as transformers has it, got {given!r}.")
        theta = self.mixer.get("rope_theta")
        rope = {"rope_type": "default", "rope_theta": 10000.0 if theta is None else theta, **given}
        if rope["rope_type"] not in ("default", *ROPE_KINDS):
            raise ValueError(
                f"rope_parameters must have a rope_type of default, {', '.join(ROPE_KINDS)}; got {rope['rope_type']!r}."
            )
        if rope["rope_type"] == "default" and (unread := rope.keys() - {"rope_type", "rope_theta"}):
            raise ValueError(
                f"rope_parameters of rope_type default hold a rope_theta, got {min(unread)} = {rope[min(unread)]!r}, "
                "which it does not read; leave it out, or name a rope_type that does."
            )
        if theta not in (None, rope["rope_theta"]):
            raise ValueError(
                f"rope_theta is given twice, rope_parameters={rope['rope_theta']} and mixer={theta}; leave it out of "
                "mixer."
            )
        self.rope_parameters = rope

    def _build(self, fields: dict) -> FreeEnergyMixerConfig:
        """The mixer of these fields, with the angles of rope_parameters, as a Llama of its key width would turn by.

        Raises ValueError on parameters that transformers refuses, and on those that turn only a part of a head.
        """
        mixer = build_config(**{"n_embd": self.hidden_size, "n_head": self.num_attention_heads, **fields})
        rope = self._scaling
        if not (rope and mixer.use_rope and ROTARY[0] in PRIORS[mixer.prior_type].uses):
            return mixer
        try:
            llama = LlamaConfig(
                hidden_size=self.hidden_size,
                num_attention_heads=self.num_attention_heads,
                head_dim=mixer.key_width,
                max_position_embeddings=self.max_position_embeddings or 4096,
                rope_parameters={**rope, "rope_theta": mixer.rope_theta},
            )
            with torch.device("cpu"):  # whatever device a model is being built on
                frequencies, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](llama, "cpu")
        except (KeyError, TypeError, RuntimeError) as error:
            raise ValueError(f"rope_parameters cannot be read by transformers, got {rope!r}: {error}") from error
        return replace(mixer, rope_frequencies=tuple(frequencies.tolist()), rope_factor=float(factor))

    def _check_sizes(self):
        self.check_sizes(SIZES, ("rms_norm_eps", "initializer_range"))
        check_flags(tie_word_embeddings=self.tie_word_embeddings, use_cache=self.use_cache)
        if not isinstance(self.layer_priors, list | tuple | None):
            raise TypeError(f"layer_priors must be a list of one entry per layer, got {self.layer_priors!r}.")
        if self.layer_priors is not None and len(self.layer_priors) != self.num_hidden_layers:
            raise ValueError(
                f"layer_priors must have one entry per layer, num_hidden_layers = {self.num_hidden_layers}, "
                f"got {len(self.layer_priors)} entries."
            )
        check_names("mixer", self.mixer, {"causal", *MODEL_NAMES})
        for layer, entry in enumerate(self.layer_priors or ()):
            if not isinstance(entry, (str, dict)):
                raise TypeError(
                    f"layer_priors[{layer}] must be a prior's name or a dict of mixer fields, got {entry!r}."
                )
            if isinstance(entry, dict):
                check_names(f"layer_priors[{layer}]", entry, {"causal", "n_embd"})


def _uses(fields: dict) -> set[str]:
    """The fields that the prior of a layer reads; empty for an unknown prior, which is refused later."""
    return set(getattr(PRIORS.get(str(fields["prior_type"])), "uses", ()))


def check_names(where: str, fields: dict, further: set[str]) -> None:
    """Raise ValueError where the fields hold one of the model's own."""
    for name in fields:
        if name in further:
            owner = MODEL_NAMES.get(name, "architecture")
            raise ValueError(f"{where} must leave {name} to the model's {owner}, got {name}={fields[name]!r}.")
