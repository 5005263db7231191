"""What `fem train` trains: models, data and training, from a laptop's to the paper's."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields

from fem.config import MLPS
from fem.recipes import option, require_not_negative, require_one_of, require_positive

DTYPES = ("float32", "bfloat16")
DOCUMENTS = ("hidden", "visible")
SMALLEST_VOCABULARY = 257  # one entry per byte, and the end of a document
WARMUP = 50  # steps; a twentieth of the laptop recipe
PAPER_ROWS = 128  # of 4096 tokens: 0.5M tokens a step


def require_predictions(recipe) -> None:
    """Raises ValueError where no token of a row is predicted, or a tokenizer has too few entries for every byte."""
    if recipe.context < 2:
        raise ValueError(f"context must be at least 2 tokens, of which one predicts, got {recipe.context}.")
    if recipe.vocabulary < SMALLEST_VOCABULARY:
        raise ValueError(f"vocabulary must be at least {SMALLEST_VOCABULARY}, got {recipe.vocabulary}.")


@dataclass(frozen=True, kw_only=True)
class TrainRecipe:
    """Model, data and training. A batch is counted over all processes, so that a recipe fits any number of GPUs."""

    preset: str = option("fem-sm-tiny", "Model, such as fem-sm-340m, fem-gla-small, transformer-tiny.")
    architecture: str | None = option(
        None,
        "Another library's model on the same rows: a type that transformers or fla knows, or a config.json.",
        called="model",
    )
    model: str = option(
        "{}", 'Other model fields than the preset\'s, as JSON: {"mixer": {"use_conv": false}}.', called="model_fields"
    )
    mlp: str = option("narrowed", "SwiGLU: narrowed to a Transformer's parameters, or kept, as in the paper.")
    data: str = option("", "Text, .jsonl, .parquet, a folder of them, or a dataset of the hub.")
    subset: str | None = option(None, "Configuration of the hub dataset.")
    field: str = option("text", "Field of a record that has its text.")
    tokenizer: str | None = option(
        None, "Tokenizer, a folder or a name on the hub; default: trained on the local data."
    )
    vocabulary: int = option(4096, "Entries of a tokenizer that is trained here.")
    context: int = option(512, "Tokens per row.")
    documents: str = option(
        "hidden",
        "Documents of a row before a token's own: hidden from it, or visible, as the paper packs them.",
    )
    batch_size: int = option(16, "Rows per step, over all processes.")
    micro_batch: int | None = option(None, "Rows per forward pass of a process; default: all its rows of a step.")
    max_steps: int = option(1000, "Optimiser steps; more extend a finished run.", called="steps")
    warmup_steps: int | None = option(
        None, f"Steps in which the learning rate rises; default: {WARMUP}, or half of --steps where that is less."
    )
    learning_rate: float = option(1e-3, "Peak learning rate of AdamW.")
    beta2: float = option(0.95, "AdamW's second moment.")
    weight_decay: float = option(0.1, "Weight decay of the weights; beta, norms and biases have none.")
    clip: float = option(1.0, "Largest norm of the gradient; larger ones are scaled down.")
    dtype: str = option("float32", f"Arithmetic: {' or '.join(DTYPES)}; weights and optimiser stay float32.")
    compile: bool = option(False, "torch.compile the model.")
    checkpointing: bool = option(False, "Recompute activations in the backward pass: slower, with less memory.")
    validation_rows: int = option(64, "Rows held out, the last ones, at most a tenth.")
    eval_steps: int = option(200, "Steps between validations.")
    log_steps: int = option(10, "Steps between lines of metrics.jsonl.")
    save_steps: int = option(200, "Steps between checkpoints; there is one at the end.")
    keep: int = option(2, "Checkpoints to keep, the newest.")
    seed: int = option(42, "Seed of the weights and of the order of the rows.")

    def __post_init__(self):
        counts = ("context", "batch_size", "max_steps", "log_steps", "save_steps", "eval_steps", "keep", "micro_batch")
        require_positive(self, *counts, "learning_rate", "clip")
        require_not_negative(self, "validation_rows", "weight_decay", "seed", "warmup_steps")
        if not 0 <= self.beta2 < 1:
            raise ValueError(f"beta2 must lie in [0, 1), got {self.beta2}.")
        if self.warmup > self.max_steps:
            raise ValueError(f"warmup_steps must be at most max_steps = {self.max_steps}, got {self.warmup}.")
        require_predictions(self)
        require_one_of("dtype", self.dtype, DTYPES)
        require_one_of("mlp", self.mlp, MLPS)
        require_one_of("documents", self.documents, DOCUMENTS)
        self.model_fields()

    @property
    def warmup(self) -> int:
        """The steps in which the learning rate rises."""
        return min(WARMUP, self.max_steps // 2) if self.warmup_steps is None else self.warmup_steps

    @property
    def tokens(self) -> int:
        """The tokens that all steps and the validation read once."""
        return (self.max_steps * self.batch_size + self.validation_rows) * self.context

    def model_fields(self) -> dict:
        """The fields of `FEMConfig` that differ from the preset's."""
        try:
            fields = json.loads(self.model)
        except json.JSONDecodeError:
            fields = None
        if not isinstance(fields, dict):
            raise ValueError(f"model_fields must be a JSON object, got {self.model!r}.")
        return fields


def paper(size: str, tokens: float) -> TrainRecipe:
    """The paper's language models (Section 3): 0.5M tokens a step, of which 1B warm up."""
    step = PAPER_ROWS * 4096
    return TrainRecipe(
        preset=f"fem-sm-{size}",
        data="HuggingFaceFW/fineweb-edu",
        subset="sample-100BT",
        tokenizer="meta-llama/Llama-2-7b-hf",
        context=4096,
        documents="visible",
        batch_size=PAPER_ROWS,
        max_steps=round(tokens / step),
        warmup_steps=round(1e9 / step),
        learning_rate=4e-4,
        dtype="bfloat16",
        validation_rows=0,
        save_steps=1000,
    )


RECIPES = {"laptop": TrainRecipe(), "paper-340m": paper("340m", 15e9), "paper-1.3b": paper("1.3b", 100e9)}
FREE = {"micro_batch", "eval_steps", "log_steps", "save_steps", "keep", "compile", "checkpointing"}
FREE |= {"data"}  # which is compared by its content


def differences(stored: dict, recipe: TrainRecipe) -> list[str]:
    """The changed options that a run under way does not allow, as "learning_rate (0.001 there, 0.002 here)".

    max_steps may be raised. A field that the run's version did not have yet had today's default.
    """
    wanted, stored = asdict(recipe), asdict(TrainRecipe()) | stored
    changed = [name for name in wanted if name not in FREE and stored[name] != wanted[name]]
    if "max_steps" in changed and stored["max_steps"] < recipe.max_steps:
        changed.remove("max_steps")
    called = {field.name: field.metadata["called"] or field.name for field in fields(recipe)}
    return [f"{called[name]} ({stored[name]} there, {wanted[name]} here)" for name in changed]
