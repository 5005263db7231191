"""How transformers' Trainer trains the language models that are compared: AdamW and a cosine."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import TrainingArguments

from fem.train.checkpoints import STAGING


def training_arguments(recipe, learning_rate: float, folder: Path, **further) -> TrainingArguments:
    """The arguments of a training that saves in `folder`, by a recipe with steps, warmup (a share of them),
    weight_decay and seed; `further` are the experiment's own."""
    return TrainingArguments(
        output_dir=str(folder / STAGING),
        max_steps=recipe.steps,
        learning_rate=learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=round(recipe.warmup * recipe.steps),
        weight_decay=recipe.weight_decay,
        adam_beta1=0.9,
        adam_beta2=0.95,
        max_grad_norm=1.0,
        seed=recipe.seed,
        data_seed=recipe.seed,
        dataloader_pin_memory=torch.cuda.is_available(),
        use_cache=True,
        report_to="none",
        disable_tqdm=True,
        log_level="error",
        **further,
    )
