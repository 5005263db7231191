"""Language models by name, such as "fem-sm-340m": a family, with as many parameters as the Transformer of that size."""

from __future__ import annotations

import torch

from fem.checks import nearest
from fem.config import MLPS, paper_fields, slim_fields, split_fields
from fem.models.configuration import FEMConfig
from fem.models.modeling import FEMBlock
from fem.priors import PRIORS

FIELDS = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
    "max_position_embeddings",
)
SIZES = {
    name: dict(zip(FIELDS, numbers))
    for name, numbers in {
        "tiny": (4096, 128, 4, 4, 352, 512),
        "small": (8192, 384, 8, 6, 1024, 1024),
        "340m": (32000, 1024, 24, 16, 2816, 4096),
        "1.3b": (32000, 2048, 24, 32, 5632, 4096),
    }.items()
}
TRANSFORMER = {
    "prior_type": "softmax",
    "mixer": {"use_conv": False, "use_lse": False, "use_temperature": False, "use_outer_gate": False},
}
# mixer fields of a width, a prior and the changes that a caller wants
STARTS = {"": lambda width, prior, changes: changes, "-slim": slim_fields, "-split": split_fields} | {
    "-paper": lambda width, prior, changes: paper_fields(prior, changes)
}
FAMILIES = {"transformer": ("softmax", lambda width, prior, changes: TRANSFORMER["mixer"] | changes)} | {
    f"fem-{'sm' if name == 'softmax' else name}{start}": (name, fields_of)
    for start, fields_of in STARTS.items()
    for name, prior in PRIORS.items()
    if start != "-split" or prior.takes_pairs
}
PRESETS = tuple(f"{family}-{size}" for size in SIZES for family in FAMILIES)
FIELDS_OF_MIXERS = ("prior_type", "layer_priors", "mixer")


def preset(name: str, *, mlp: str = "narrowed", **changes) -> FEMConfig:
    """The configuration called `name`, one of `PRESETS`, with the fields in `changes` replaced.

    Its SwiGLU is narrowed until the model has the parameters of the Transformer of the same size and changes, within
    0.5 %, conditioner included; with mlp="kept" it is as wide as the Transformer's, as in the paper. mixer={...}
    changes single mixer fields, as ablations do. Raises ValueError on another name, and whatever `FEMConfig` raises.
    """
    if mlp not in MLPS:
        raise ValueError(f"mlp must be one of {', '.join(MLPS)}; got {mlp!r}.")
    check_preset(name)
    family, size = name.rsplit("-", 1)
    sizes = SIZES[size] | {field: value for field, value in changes.items() if field not in FIELDS_OF_MIXERS}
    transformer = FEMConfig(**sizes, **TRANSFORMER)  # refuses a hidden_size that is none
    prior, fields_of = FAMILIES[family]
    mixers = {"prior_type": prior} | {field: value for field, value in changes.items() if field in FIELDS_OF_MIXERS}
    if isinstance(changed := changes.get("mixer") or {}, dict):  # FEMConfig refuses what is none
        mixers["mixer"] = fields_of(transformer.hidden_size, prior, changed)
    config = FEMConfig(**sizes, **mixers)
    if mlp == "narrowed":
        excess = (count_parameters(config) - count_parameters(transformer)) / config.num_hidden_layers
        width, units = config.hidden_size, config.intermediate_size
        config.intermediate_size = narrowed_mlp(units, excess, per_unit=3 * width, hidden_size=width)
    return config


def check_preset(name: str) -> None:
    """Raises ValueError where no preset has this name."""
    if name not in PRESETS:
        raise ValueError(
            f"preset must be one of FAMILY-SIZE with a family of {', '.join(FAMILIES)} and a size of "
            f"{', '.join(SIZES)}; got {name!r}{nearest(name, PRESETS)}"
        )


def count_parameters(config: FEMConfig) -> int:
    """Parameters of the model that `config` describes, tied ones counted once; allocates nothing."""
    mixers = config.mixer_configs()
    with torch.device("meta"):  # a block of each kind
        blocks = {mixer: FEMBlock(config, mixer, 0) for mixer in set(mixers)}
    sizes = {mixer: sum(parameter.numel() for parameter in block.parameters()) for mixer, block in blocks.items()}
    tables = 1 if config.tie_word_embeddings else 2
    return sum(sizes[mixer] for mixer in mixers) + (tables * config.vocab_size + 1) * config.hidden_size


def narrowed_mlp(width: int, excess: int | float, per_unit: int, hidden_size: int) -> int:
    """The width of an MLP with so many parameters less, in steps of hidden_size / 32; a unit of width has `per_unit`.

    Raises ValueError where nothing of it would be left.
    """
    step = max(1, hidden_size // 32)
    narrowed = width - step * round(excess / (step * per_unit))
    if narrowed < 1:
        raise ValueError(
            f"the mixers leave no room for an MLP: they have {excess:.0f} parameters a layer too many, and one of "
            f"width {width} has {per_unit * width}; narrow them, or give intermediate_size."
        )
    return narrowed
