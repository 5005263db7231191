"""What `fem ablate` compares, as a recipe."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from fem.runs.recipes import listed, numbers, require_not_negative, require_one_of, require_positive
from fem.runs.run import option
from fem_research.common.mixers import priors
from fem_research.lm.ablations import ROWS, row_fields, row_of

if TYPE_CHECKING:
    from fem_research.lm.small import LanguageRecipe


@dataclass(frozen=True, kw_only=True)
class AblateRecipe:
    """The mixers, learning rates and seeds to compare, and the model that all share. Takes a laptop some hours."""

    text: Path | None = option(None, "UTF-8 text file; default: Python's sources and help topics.", called="text_file")
    prior: str = option("softmax", "Prior of all mixers.")
    rows: str = option(
        " ".join(ROWS),
        "Mixers of this prior with commas, such as attention,attention+LT,FEM; or the paper's rows with spaces.",
        called="mixers",
    )
    learning_rates: str = option("0.001,0.002,0.004", "Each mixer takes the best of these on the first seed.")
    seeds: int = option(3, "Seeds at the chosen learning rate.")
    seed: int = option(0, "First seed.")
    lambda_init: float = option(0.0, "Bias of the lambda projection at the start; the paper's is 0.")
    layers: int = option(4, "Blocks of a model.")
    width: int = option(128, "Width of a model.")
    heads: int = option(4, "Heads of every mixer.")
    mlp_width: int = option(352, "Width of the prior's SwiGLU; mixers with more parameters get narrower ones.")
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
        require_not_negative(self, "seed")
        require_one_of("prior", self.prior, priors())
        if not self.row_names() or not self.rates():
            raise ValueError("mixers and learning_rates must name at least one each.")
        for row in self.row_names():
            row_fields(row, self.prior)

    def row_names(self) -> list[str]:
        if any(word.partition("/")[0] in ROWS for word in self.rows.split()):
            return list(dict.fromkeys(self.rows.split()))
        return list(dict.fromkeys(row_of(name, self.prior) for name in listed(self.rows)))

    def rates(self) -> tuple[float, ...]:
        return numbers("learning_rates", self.learning_rates)

    def language(self, learning_rate: float, seed: int) -> LanguageRecipe:
        from fem_research.lm.small import LanguageRecipe

        shared = {field.name for field in fields(LanguageRecipe)} & {field.name for field in fields(self)}
        given = {name: getattr(self, name) for name in shared}
        return LanguageRecipe(**given | {"learning_rate": learning_rate, "seed": seed})
