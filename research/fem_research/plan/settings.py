"""The options of `fem plan`: a training, and the cards that it may run on. Needs no torch, so that help is quick."""

from __future__ import annotations

from dataclasses import dataclass

from fem.recipes import option, require_one_of, require_positive
from fem.train.recipe import PAPER_ROWS

SIZES = ("tiny", "340m", "1.3b")
FORMS = {
    "full": "fem-sm",
    "slim": "fem-sm-slim",
    "split": "fem-sm-split",
    "gla": "fem-gla",
    "attention": "transformer",
}


@dataclass(frozen=True)
class Card:
    """Figures of a vendor's data sheet: bfloat16 operations, bytes, and bytes a second (one way, of one GPU)."""

    flops: float
    memory: float
    bandwidth: float
    nvlink: float
    network: float


CARDS = {  # SXM modules; network: one port a GPU, 400 Gb/s (InfiniBand NDR), of A100 200 Gb/s (HDR)
    "a100": Card(312e12, 80e9, 2.039e12, 300e9, 25e9),
    "h100": Card(989e12, 80e9, 3.35e12, 450e9, 50e9),
    "h200": Card(989e12, 141e9, 4.8e12, 450e9, 50e9),
    "b200": Card(2250e12, 180e9, 7.7e12, 900e9, 50e9),
}


@dataclass(frozen=True)
class Job:
    """A training: a model of the paper's size in one form, and how its rows and layers are dealt to GPUs."""

    size: str = option("1.3b", f"Language model: {', '.join(SIZES)}. The paper has 340m and 1.3b.")
    form: str = option("slim", f"Form of the mixers: {', '.join(FORMS)}.")
    gpus: int = option(64, "GPUs, 8 to a machine.")
    card: str = option("h100", f"Kind of GPU: {', '.join(CARDS)}.")
    context: int = option(4096, "Tokens of a row.")
    micro: int = option(1, "Rows of one pass.")
    tensor: int = option(1, "GPUs that share every layer (tensor parallel).")
    rows_over: int = option(1, "GPUs that share a row (context parallel).")
    recompute: bool = option(True, "Compute blocks again in the backward pass (activation checkpointing).")
    tokens: int = option(PAPER_ROWS * 4096, "Tokens of a step, over all GPUs.")

    def __post_init__(self):
        for name, known in (("size", SIZES), ("form", tuple(FORMS)), ("card", tuple(CARDS))):
            require_one_of(name, getattr(self, name), known)
        require_positive(self, "gpus", "context", "micro", "tensor", "rows_over", "tokens")
        if self.tokens % self.context:
            raise ValueError(f"context must divide the {self.tokens} tokens of a step, got {self.context}.")
        if self.gpus % (self.tensor * self.rows_over):
            raise ValueError(
                f"gpus must be a multiple of tensor = {self.tensor} times rows_over = {self.rows_over}, "
                f"got {self.gpus}."
            )
        if self.tensor > 1:
            from fem.models.presets import preset

            if preset(f"{FORMS[self.form]}-{self.size}").num_attention_heads % self.tensor:
                raise ValueError(f"tensor must divide the number of heads, got {self.tensor}.")
        if self.context % self.rows_over:
            raise ValueError(f"context must be a multiple of rows_over = {self.rows_over}, got {self.context}.")
        if self.rows % (self.groups * self.micro):
            raise ValueError(
                f"a step has {self.rows} rows of {self.context} tokens, which {self.groups} groups of GPUs cannot "
                f"share; lower gpus = {self.gpus} or micro = {self.micro}, "
                f"or raise tensor = {self.tensor} or rows_over = {self.rows_over}."
            )

    @property
    def rows(self) -> int:
        return self.tokens // self.context

    @property
    def groups(self) -> int:
        """Groups of GPUs that read rows of their own."""
        return self.gpus // (self.tensor * self.rows_over)

    @property
    def shards(self) -> int:
        """GPUs that FSDP shards weights and optimiser over."""
        return self.gpus // self.tensor

    @property
    def passes(self) -> int:
        """Forward and backward passes of a GPU in a step."""
        return self.rows // (self.groups * self.micro)

    @property
    def here(self) -> int:
        """Tokens of one pass on one GPU."""
        return self.micro * self.context // self.rows_over
