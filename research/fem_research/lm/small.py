"""A small language model, trained with transformers' Trainer, for the demo, ablations and comparisons."""

from __future__ import annotations

import math
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from datasets import Dataset
from rich.progress import Progress
from transformers.utils.logging import disable_progress_bar

from fem.config import MLPS
from fem.models import FEMConfig, FEMForCausalLM
from fem.models.presets import preset
from fem.recipes import option, require_one_of
from fem.train.saving import NotFinite, SavingTrainer
from fem_research.common.trainer import training_arguments
from fem_research.common.watch import Watch, validations
from fem_research.lm.text import Corpus

SOFTMAX_ATTENTION = {"use_conv": False, "use_temperature": False, "use_lse": False, "use_outer_gate": False}
MIXERS = {"fem": {}, "softmax": SOFTMAX_ATTENTION}


@dataclass(frozen=True, kw_only=True)
class LanguageRecipe:
    """A language model and its training. The defaults suit a laptop: a million parameters, a few minutes."""

    layers: int = option(4, "Blocks of the model.")
    width: int = option(128, "Width of the model.")
    heads: int = option(4, "Heads of every mixer.")
    mlp_width: int = option(352, "Width of softmax attention's SwiGLU; mixers with more parameters get narrower ones.")
    mlp: str = option("narrowed", "SwiGLU: narrowed to equal parameters, or kept, as in the paper.")
    vocabulary: int = option(2048, "Entries of the byte-pair tokenizer.")
    context: int = option(128, "Tokens per sequence.")
    batch: int = option(16, "Sequences per step.")
    steps: int = option(700, "Optimiser steps.")
    learning_rate: float = option(2e-3, "Peak learning rate of AdamW.")
    warmup: float = option(0.05, "Share of the steps in which the learning rate rises.")
    weight_decay: float = option(0.1, "Weight decay of the weights; beta, norms and biases have none.")
    validations: int = option(8, "Validations, evenly spaced; the last at the end.")
    validation_blocks: int = option(256, "Most held-out blocks of tokens, evenly spaced, that a validation reads.")
    seed: int = option(0, "Seed of the weights and of the order of the data.")

    def __post_init__(self):
        require_one_of("mlp", self.mlp, MLPS)


def model_config(recipe: LanguageRecipe, mixer: dict, vocabulary: int) -> FEMConfig:
    """A model with as many parameters as softmax attention's: a mixer that has more gets narrower SwiGLUs,
    unless they are kept.

    mixer: fields of `FreeEnergyMixerConfig`, its prior_type among them where it is not softmax.
    """
    fields = dict(mixer)
    return preset(
        "fem-sm-tiny",
        mlp=recipe.mlp,
        vocab_size=vocabulary,
        hidden_size=recipe.width,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        intermediate_size=recipe.mlp_width,
        max_position_embeddings=recipe.context,
        prior_type=fields.pop("prior_type", "softmax"),
        mixer=fields,
    )


def train(
    model: FEMForCausalLM,
    corpus: Corpus,
    recipe: LanguageRecipe,
    bars: Progress,
    title: str,
    folder: Path | None = None,
) -> dict:
    """Train the model in place; returns its last {"val_loss", "parameters", "tokens_per_second", "curve"}.

    val_loss: nats per token of the held-out blocks; curve: every validation. A bar under the title shows the steps.
    Every validation leaves a checkpoint in `folder`, if one is given, from which a stopped training goes on; one whose
    weights are no longer finite ends there, with an infinite val_loss.
    """
    disable_progress_bar()
    every = max(1, recipe.steps // recipe.validations)
    with tempfile.TemporaryDirectory() if folder is None else nullcontext(folder) as output:
        trainer = SavingTrainer(
            output=Path(output),
            callbacks=[Watch(bars, title)],
            model=model,
            args=training_arguments(
                recipe,
                recipe.learning_rate,
                Path(output),
                per_device_train_batch_size=recipe.batch,
                per_device_eval_batch_size=recipe.batch,
                eval_strategy="steps",
                eval_steps=every,
                logging_steps=every,
                save_strategy="no" if folder is None else "steps",
                save_steps=every,
                prediction_loss_only=True,
            ),
            train_dataset=corpus.train,
            eval_dataset=_evenly_spaced(corpus.validation, recipe.validation_blocks),
        )
        try:
            trainer.go_on()
            finite = True
        except NotFinite:
            finite = False
    curve = validations(trainer.state.log_history)  # the Trainer validates after the last step, and before it saves
    last = curve[-1]
    return {
        "val_loss": last["val_loss"] if finite else math.inf,
        "parameters": model.num_parameters(),
        "tokens_per_second": last["step"] * recipe.batch * recipe.context / last["seconds"],
        "curve": curve,
    }


def _evenly_spaced(blocks: Dataset, most: int) -> Dataset:
    count = min(most, len(blocks))
    return blocks.select(np.linspace(0, len(blocks) - 1, count).astype(int))
