"""What `fem argmax` runs, as a recipe: the task's size and how the readers are trained."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from fem.checks import finite_number
from fem.recipes import option, require_not_negative, require_one_of, require_positive

FORMS = ("spread", "paper")
SAME = ("parameters", "prior")


@dataclass(frozen=True, kw_only=True)
class ArgmaxRecipe:
    """The task's size and how the readers are trained. The defaults take some minutes on one core."""

    form: str = option(
        "spread",
        "spread: every channel has a level and a width of its own, so that answering a constant fails; paper: the data "
        "of Appendix P, where answering 1 wins.",
    )
    same: str = option(
        "parameters",
        "What both readers have in common. parameters: as many, with wider queries and keys in attention; prior: "
        "queries and keys as wide as the values, as in Appendix P.",
    )
    tokens: int = option(64, "Tokens T of an example.")
    channels: int = option(64, "Channels D of an example.")
    heads: int = option(4, "Heads of both readers.")
    train_examples: int = option(200_000, "Training examples.")
    validation_examples: int = option(1_000, "Examples that decide when the training of a reader stops.")
    test_examples: int = option(1_000, "Further examples, on which the trained readers are scored.")
    batch: int = option(32, "Examples per step.", called="batch_size")
    steps: int = option(4_000, "Most optimiser steps of each reader.")
    enough: float = option(0.999, "Share of hits on the validation at which training stops; above 1: never.")
    learning_rate: float = option(2e-2, "Learning rate of AdamW.")
    eval_every: int = option(250, "Steps between two validations.")
    seeds: int = option(3, "How many seeds.")
    seed: int = option(0, "First seed, of the data and of both readers.")
    threads: int = option(1, "CPU threads; more of them are faster on an idle machine, and slower on a busy one.")

    def __post_init__(self):
        require_positive(self, *(name for name in asdict(self) if name not in ("enough", "seed", "form", "same")))
        require_not_negative(self, "seed")
        require_one_of("form", self.form, FORMS)
        require_one_of("same", self.same, SAME)
        if self.tokens < 2:
            raise ValueError(f"tokens must be at least 2, of which one has the maximum, got {self.tokens}.")
        finite_number("enough", self.enough, 0.0, math.inf)
        if self.channels % self.heads:
            raise ValueError(f"heads must divide channels = {self.channels}, got heads = {self.heads}.")
        if self.channels * min(self.validation_examples, self.test_examples) < 2:
            told = f"got {self.validation_examples} and {self.test_examples} of one channel"
            raise ValueError(f"validation_examples and test_examples must hold at least 2 maxima, {told}.")
        if self.train_examples < self.batch:
            raise ValueError(f"train_examples must fill one batch of {self.batch}, got {self.train_examples}.")


PAPER = {
    "form": "paper",
    "same": "prior",
    "tokens": 128,
    "channels": 512,
    "heads": 4,
    "train_examples": 200_000,
    "validation_examples": 2_000,
    "batch": 64,
    "learning_rate": 1e-2,
    "steps": 2_000,
    "enough": 2.0,  # never: all steps
    "eval_every": 100,
    "seeds": 1,
    "seed": 42,
}
