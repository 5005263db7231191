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
from fem_research.vision.images import Pictures
from fem_research.vision.settings import COPIES, VisionRecipe
from fem_research.vision.views import Batches, Stream, View


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
    """`Watch`, which also passes the epoch to the training view; to a stream the step at which it begins."""

    def __init__(self, view: View | Stream, bars: Progress, title: str):
        super().__init__(bars, title)
        self.view = view

    def on_epoch_begin(self, args, state, control, **_):
        self.view.epoch = state.global_step if isinstance(self.view, Stream) else int(state.epoch + 1e-6)


class DeiTTrainer(SavingTrainer):
    """With repeated augmentation."""

    def _get_train_sampler(self, train_dataset: View | None = None):
        from fem_research.vision.deit import Copies

        return Copies(self.train_dataset)


def train(job: VisionRecipe, pictures: Pictures, folder: Path, model_folder: Path, bars: Progress) -> dict:
    """Run the job from its newest complete checkpoint in `folder`, if there is one; save the model to `model_folder`.

    The record has top-1 accuracy and loss (nats) on the held-out pictures after the last step; seconds are of its
    steps.
    """
    disable_progress_bar()
    with torch.random.fork_rng():
        torch.manual_seed(job.seed)
        model = convolve(FEMForImageClassification(model_config(job, pictures.classes)), job.mixers)
    deit = job.recipe == "deit"
    view = (
        Stream(pictures.train, job, training=True, copies=COPIES if deit else 1)
        if job.stream
        else View(pictures.train, job, training=True)
    )
    args = training_arguments(job, pictures.counts[0], folder)
    trainer = (DeiTTrainer if deit else SavingTrainer)(
        output=folder,
        callbacks=[ImageWatch(view, bars, f"{display(job.mixers)}, seed {job.seed}")],
        model=model,
        args=args,
        train_dataset=view,
        eval_dataset=(Stream if job.stream else View)(pictures.test, job),
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


FIRST, LAST = 1e-6, 1e-5  # DeiT's learning rates before the rise and after the cosine


def training_arguments(job: VisionRecipe, pictures: int, folder: Path) -> TrainingArguments:
    deit = job.recipe == "deit"
    if deit and pictures < job.batch:
        raise ValueError(f"batch_size must be at most the {pictures:,} pictures of an epoch, got {job.batch}.")
    steps = job.epochs * (pictures // job.batch if deit else -(-pictures // job.batch))
    every = -(-steps // job.validations)
    cuda = torch.cuda.is_available()
    args = TrainingArguments(
        output_dir=str(folder / STAGING),
        max_steps=steps,
        learning_rate=job.learning_rate,
        lr_scheduler_type="cosine_warmup_with_min_lr" if deit else "cosine",
        lr_scheduler_kwargs={"min_lr": LAST, "warmup_lr_rate": FIRST / job.learning_rate} if deit else {},
        warmup_steps=round(job.warmup * steps),
        weight_decay=job.weight_decay,
        max_grad_norm=0.0 if deit else 1.0,
        seed=job.seed,
        data_seed=job.seed,
        bf16=job.dtype == "bfloat16",
        eval_strategy="steps",
        eval_steps=every,
        logging_steps=every,
        save_strategy="steps",
        save_steps=every,
        remove_unused_columns=False,
        ignore_data_skip=job.stream,
        ddp_find_unused_parameters=False,
        dataloader_num_workers=job.workers,
        dataloader_pin_memory=cuda,
        use_cpu=not cuda,
        report_to="none",
        disable_tqdm=True,
        log_level="error",
    )
    if job.batch % (args.world_size * (1 + deit)):
        each = "an even number for each" if deit else "a multiple"
        raise ValueError(f"batch_size must be {each} of the {args.world_size} processes, got {job.batch}.")
    args.per_device_train_batch_size = args.per_device_eval_batch_size = job.batch // args.world_size
    return args


def _accuracy(prediction: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float(np.mean(prediction.predictions == prediction.label_ids))}
