"""One run: a classifier with one mixer and one seed, trained by transformers' Trainer, which can be resumed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from rich.progress import Progress
from transformers import EvalPrediction, TrainingArguments
from transformers.utils.logging import disable_progress_bar

from fem.models import FEMForImageClassification, FEMImageConfig
from fem.train.checkpoints import STAGING
from fem.train.saving import SavingTrainer
from fem_research.common.blocks import convolve
from fem_research.common.mixers import fields_of
from fem_research.common.names import display
from fem_research.common.watch import Watch, validations
from fem_research.vision.images import Batches, Pictures, View
from fem_research.vision.settings import VisionRecipe


def model_config(job: VisionRecipe, classes: list[str]) -> FEMImageConfig:
    """The job's model, with as many parameters as DeiT: a mixer that has more gets narrower MLPs, or they are kept."""
    mixer = fields_of(job.mixers)
    return FEMImageConfig(
        image_size=job.image_size,
        patch_size=job.patch_size,
        num_channels=job.channels,
        hidden_size=job.width,
        num_hidden_layers=job.layers,
        num_attention_heads=job.heads,
        intermediate_size=4 * job.width if job.mlp == "kept" else None,
        prior_type=mixer.pop("prior_type"),
        mixer=mixer,
        pooling=job.pooling,
        drop_path_rate=job.drop_path,
        id2label=dict(enumerate(classes)),
        label2id={name: index for index, name in enumerate(classes)},
    )


class ImageWatch(Watch):
    """`Watch`, which also passes the epoch to the training view."""

    def __init__(self, view: View, bars: Progress, title: str):
        super().__init__(bars, title)
        self.view = view

    def on_epoch_begin(self, args, state, control, **_):
        self.view.epoch = int(state.epoch + 1e-6)


def train(job: VisionRecipe, pictures: Pictures, folder: Path, model_folder: Path, bars: Progress) -> dict:
    """Run the job from its newest complete checkpoint in `folder`, if there is one; save the model to `model_folder`.

    The record has top-1 accuracy and loss (nats) on the held-out pictures after the last step; seconds are of its
    steps.
    """
    disable_progress_bar()
    with torch.random.fork_rng():
        torch.manual_seed(job.seed)
        model = convolve(FEMForImageClassification(model_config(job, pictures.classes)), job.mixers)
    view = View(pictures.train, job, training=True)
    args = training_arguments(job, len(view), folder)
    trainer = SavingTrainer(
        output=folder,
        callbacks=[ImageWatch(view, bars, f"{display(job.mixers)}, seed {job.seed}")],
        model=model,
        args=args,
        train_dataset=view,
        eval_dataset=View(pictures.test, job),
        data_collator=Batches(len(pictures.classes), job),
        compute_metrics=_accuracy,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
    )
    tests = validations(trainer.go_on())
    trainer.save_model(str(model_folder))
    names = {"mixer": job.mixers, "seed": job.seed, "parameters": model.num_parameters()}
    scores = {"accuracy": tests[-1]["val_accuracy"], "loss": tests[-1]["val_loss"], "curve": tests}
    seconds = tests[-1]["seconds"]
    return names | scores | {"images_per_second": args.max_steps * job.batch / seconds, "seconds": seconds}


def training_arguments(job: VisionRecipe, pictures: int, folder: Path) -> TrainingArguments:
    steps = job.epochs * -(-pictures // job.batch)
    every = -(-steps // job.validations)
    cuda = torch.cuda.is_available()
    args = TrainingArguments(
        output_dir=str(folder / STAGING),
        max_steps=steps,
        learning_rate=job.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=round(job.warmup * steps),
        weight_decay=job.weight_decay,
        max_grad_norm=1.0,
        seed=job.seed,
        data_seed=job.seed,
        bf16=job.dtype == "bfloat16",
        eval_strategy="steps",
        eval_steps=every,
        logging_steps=every,
        save_strategy="steps",
        save_steps=every,
        remove_unused_columns=False,
        ddp_find_unused_parameters=False,
        dataloader_num_workers=job.workers,
        dataloader_pin_memory=cuda,
        use_cpu=not cuda,
        report_to="none",
        disable_tqdm=True,
        log_level="error",
    )
    if job.batch % args.world_size:
        raise ValueError(f"batch_size must be a multiple of the {args.world_size} processes, got {job.batch}.")
    args.per_device_train_batch_size = args.per_device_eval_batch_size = job.batch // args.world_size
    return args


def _accuracy(prediction: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float(np.mean(prediction.predictions == prediction.label_ids))}
