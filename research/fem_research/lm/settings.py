"""What `fem ablate` and `fem finetune` compare, as recipes, and the rows of an ablation."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fem.config import MLPS
from fem.recipes import listed, option, require_not_negative, require_one_of, require_positive
from fem.train.recipe import require_predictions
from fem_research.common.mixers import UNNORMALISED, above_zero, canonical, fields_of, priors, taken_apart
from fem_research.common.names import display

if TYPE_CHECKING:
    from fem_research.lm.small import LanguageRecipe


class Row(NamedTuple):
    """The parts that a row has, and what it is, in words."""

    parts: str
    remark: str


ROWS = {
    "full": Row("CLTG", "the Free Energy Mixer"),
    "-G": Row("CLT", "no outer gate"),
    "-G,T": Row("CL", "no outer gate, log-sum-exp at beta 1"),
    "-G,T,L": Row("C", "the conditioner alone"),
    "-C": Row("LTG", "the Free Energy Mixer without its conditioner"),
    "-C,G": Row("LT", "free energy and temperature gate alone"),
    "-C,G,T": Row("L", "LASER: log-sum-exp alone, at beta 1"),
    "-C,G,T,L": Row("", "the prior alone"),
    "+G": Row("G", "control: the outer gate alone, no free energy"),
    "+C,G": Row("CG", "control: all but the free energy"),
}
OPTIONS = {"r": "gates of rank {}", "b": "beta from {}", "l": "lambda's bias at {}", "h": "{} heads", "s": "{} read F"}
OPTIONS |= {"c": "{} channels in the conditioner"}
NAMED_OPTIONS = {"norm": "normalised", "norope": "no position code", "conv": "behind a short convolution"}
NAMED_OPTIONS |= {"wide": "values as wide as the model", "double": "values twice as wide", "thirds": "2/3 as wide"}
NAMED_OPTIONS |= {"cpaper": "the paper's conditioner", "cauthors": "the authors' conditioner"}
NAMED_OPTIONS |= {"paper": "the authors' width", "lambda": "lambda kept, as in the authors' file"}


def row_fields(row: str, prior: str) -> dict:
    """The fields of `FreeEnergyMixerConfig` that make this row of this prior. Raises ValueError as `mixer_name`."""
    return fields_of(mixer_name(row, prior))


def mixer_name(row: str, prior: str) -> str:
    """The mixer of a row, such as "softmax+LTG"; "-C/r8": with gates of rank 8, and other options of `canonical`;
    "full-norm": with an unnormalised score."""
    whole, slash, options = row.partition("/")
    name = whole.removesuffix(UNNORMALISED)
    if name not in ROWS:
        raise ValueError(f"mixers must be rows from {'; '.join(ROWS)}, with options such as /r8, got {row!r}.")
    parts = ROWS[name].parts
    return canonical((f"{prior}+{parts}" if parts else prior) + whole[len(name) :] + slash + options)


def row_of(mixer: str, prior: str) -> str:
    """The row of a mixer, such as "-C/r8" of "attention+LTG/r8"."""
    own, parts, raw, options = taken_apart(canonical(mixer))
    row = next((row for row, found in ROWS.items() if found.parts == parts), None)
    if own != prior or row is None:
        known = ", ".join(display(prior + (f"+{row.parts}" if row.parts else "")) for row in ROWS.values())
        raise ValueError(f"mixers must be from {known}, with options such as /r8, got {mixer!r}; see --prior.")
    named = "/".join([row, *options])
    return (
        named if not raw or mixer_name(named, prior) == canonical(mixer) else "/".join([row + UNNORMALISED, *options])
    )


def remark(row: str) -> str:
    """The row in words."""
    whole, *options = row.split("/")
    name = whole.removesuffix(UNNORMALISED)
    raw = ["unnormalised"] if whole != name else []
    said = [NAMED_OPTIONS.get(option) or OPTIONS[option[0]].format(option[1:]) for option in options]
    return ", ".join([ROWS[name].remark, *raw, *said])


@dataclass(frozen=True, kw_only=True)
class AblateRecipe:
    """The mixers, learning rates and seeds to compare, and the model that all share. Takes a laptop some hours."""

    text: Path | None = option(None, "UTF-8 text file; default: Python's sources and help topics.", called="text_file")
    prior: str = option("softmax", "Prior of all mixers.")
    rows: str = option(
        "all",
        "Mixers of this prior with commas, such as attention,attention+LT,FEM; all: every combination of parts.",
        called="mixers",
    )
    learning_rates: str = option("0.001,0.002,0.004", "Each mixer takes the best of these on the first seed.")
    seeds: int = option(3, "Seeds at the chosen learning rate.")
    seed: int = option(0, "First seed.")
    layers: int = option(4, "Blocks of a model.")
    width: int = option(128, "Width of a model.")
    heads: int = option(4, "Heads of every mixer.")
    mlp_width: int = option(352, "Width of the prior's SwiGLU; mixers with more parameters get narrower ones.")
    mlp: str = option("narrowed", "SwiGLU: narrowed to equal parameters, or kept, as in the paper.")
    vocabulary: int = option(2048, "Entries of the byte-pair tokenizer.")
    context: int = option(128, "Tokens per sequence.")
    batch: int = option(4, "Sequences per step.", called="batch_size")
    steps: int = option(600, "Optimiser steps.")
    equal_time: bool = option(False, "Fewer steps for mixers that take longer: all train as long as the fastest.")
    validations: int = option(6, "Validations, evenly spaced.")
    threads: int = option(1, "CPU threads.")

    def __post_init__(self):
        require_positive(self, "seeds", "layers", "width", "heads", "mlp_width", "vocabulary", "context")
        require_positive(self, "batch", "steps", "validations", "threads")
        require_predictions(self)
        require_not_negative(self, "seed")
        require_one_of("prior", self.prior, priors())
        require_one_of("mlp", self.mlp, MLPS)
        if not self.row_names() or not self.rates():
            raise ValueError("mixers and learning_rates must name at least one each.")
        for row in self.row_names():
            row_fields(row, self.prior)

    def row_names(self) -> list[str]:
        """The rows by what they leave out, as records of trainings are named; a reader sees the mixers."""
        if self.rows == "all":
            return list(ROWS)
        if any(word.partition("/")[0].removesuffix(UNNORMALISED) in ROWS for word in self.rows.split()):
            return list(dict.fromkeys(self.rows.split()))
        return list(dict.fromkeys(row_of(name, self.prior) for name in listed(self.rows)))

    def rates(self) -> tuple[float, ...]:
        return above_zero("learning_rates", self.learning_rates)

    def language(self, learning_rate: float, seed: int) -> LanguageRecipe:
        from fem_research.lm.small import LanguageRecipe

        shared = {field.name for field in fields(LanguageRecipe)} & {field.name for field in fields(self)}
        values = {name: getattr(self, name) for name in shared}
        return LanguageRecipe(**values | {"learning_rate": learning_rate, "seed": seed})


ARCHITECTURES = {"gpt2": "GPT-2", "llama": "Llama"}
ATTENTION = "attention"
FIELDS: dict[str, dict | None] = {
    ATTENTION: None,  # the original as it is
    "attention+G": {"use_temperature": False},  # the outer gate alone, no free energy
    "attention+LTG/r4": {"gate_rank": 4},  # nearly the original's parameters
    "attention+LTG": {},
}


@dataclass(frozen=True, kw_only=True)
class FinetuneRecipe:
    """A model, its training, and further training of it with every mixer. The defaults take a laptop some minutes."""

    text: Path | None = option(None, "UTF-8 text file; default: Python's sources and help topics.", called="text_file")
    architecture: str = option("gpt2", "gpt2, or llama with grouped heads.")
    mixers: str = option(
        ",".join(FIELDS),
        "attention: the model as it is; copies with +G (only the outer gate), +LTG/r4 (gates of rank 4), +LTG.",
    )
    layers: int = option(3, "Blocks of the original.")
    width: int = option(96, "Width of the original.")
    heads: int = option(4, "Heads of the original; llama has half as many key-value heads.")
    vocabulary: int = option(1024, "Entries of the byte-pair tokenizer.")
    context: int = option(64, "Tokens per sequence.")
    batch: int = option(16, "Sequences per step.", called="batch_size")
    steps: int = option(600, "Steps that train the original.")
    further_steps: int = option(300, "Steps of further training with each mixer.")
    learning_rate: float = option(2e-3, "Peak learning rate of AdamW for the original.")
    further_learning_rate: float = option(1e-3, "Peak learning rate of AdamW in the further training.")
    awakening: float = option(30.0, "Factor on the learning rate of lambda and beta, since lambda starts at 5e-5.")
    runs: int = option(3, "Orders of the data; all mixers are trained in each.", called="seeds")
    seed: int = option(0, "Seed of the weights and of the first order of the data.")

    def __post_init__(self):
        require_one_of("architecture", self.architecture, ARCHITECTURES)
        if not {ATTENTION} <= set(self.mixer_names) <= FIELDS.keys():
            raise ValueError(f"mixers must be {ATTENTION} and some of {', '.join(FIELDS)}, got {self.mixers!r}.")
        require_positive(self, "layers", "width", "heads", "context", "batch", "steps", "further_steps", "runs")
        require_positive(self, "vocabulary", "learning_rate", "further_learning_rate", "awakening")
        require_predictions(self)
        require_not_negative(self, "seed")
        if self.architecture == "llama" and self.heads % 2:
            raise ValueError(f"heads must be even for llama, got {self.heads}.")
        name, share = ("width / 2", self.width / 2) if self.architecture == "llama" else ("width", self.width)
        if share % self.heads:  # llama's heads are rotated, so that their widths are even
            raise ValueError(f"heads must divide {name} = {share:g}, got {self.heads}.")

    @property
    def mixer_names(self) -> list[str]:
        return listed(self.mixers)
