"""One run: a mixer in its backbone, trained on one setting of a task and tested at evenly spaced steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from fem.optim import parameter_groups
from fem_research.common.blocks import EPS, count_parameters, initialise, mixer_blocks
from fem_research.common.loops import descend, restore, save
from fem_research.mad.settings import Job, Setting, Training
from fem_research.mad.tasks import IGNORED, build, generate


class LanguageBackbone(nn.Module):
    """Tokens (B, T) -> logits (B, T, V): embedding, blocks, norm, head."""

    def __init__(self, vocab_size: int, width: int, blocks: nn.Sequential):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.blocks = blocks
        self.head = nn.Sequential(nn.RMSNorm(width, EPS), nn.Linear(width, vocab_size))

    def forward(self, tokens: Int[Tensor, "b t"]) -> Float[Tensor, "b t v"]:
        return self.head(self.blocks(self.embedding(tokens)))


class AutoEncoderBackbone(nn.Module):
    """Tokens (B, T) -> logits (B, T, V), all of them from h, the blocks' output at the last token:

    logits_t = head(decode(h + position_t))
    """

    def __init__(self, vocab_size: int, width: int, blocks: nn.Sequential):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.blocks = blocks
        norm = lambda: nn.RMSNorm(width, EPS)  # noqa: E731
        linear = lambda: nn.Linear(width, width)  # noqa: E731
        self.decode = nn.Sequential(norm(), linear(), nn.GELU(), norm(), linear(), nn.GELU())
        self.head = nn.Sequential(norm(), nn.Linear(width, vocab_size))

    def forward(self, tokens: Int[Tensor, "b t"]) -> Float[Tensor, "b t v"]:
        code = self.blocks(self.embedding(tokens))[:, -1:]
        return self.head(self.decode(code + sinusoids(tokens.shape[1], code)))


def sinusoids(length: int, like: Float[Tensor, "*_ d"]) -> Float[Tensor, "t d"]:
    """Fixed position vectors, sines in the first half and cosines in the second, at wavelengths from 2 pi to 2e4 pi."""
    half = like.shape[-1] // 2
    rates = 1e4 ** -(torch.arange(half, device=like.device) / half)
    angles = torch.arange(length, device=like.device)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], -1).to(like.dtype)


def build_backbone(task: str, vocab_size: int, mixer: str, training: Training, initialisation: str) -> nn.Module:
    """The task's model around a mixer: as many parameters as around softmax attention (`mixer_blocks`), and all linear
    maps started by one rule (`initialise`)."""
    blocks = mixer_blocks(mixer, training.width, training.heads, training.blocks, training.mlp_width, training.mlp)
    backbone = AutoEncoderBackbone if task == "compression" else LanguageBackbone
    model = backbone(vocab_size, training.width, blocks)
    initialise(model, initialisation)
    return model


MINUTE = 60.0  # between checkpoints: those of a small model may take longer than its steps
Point = dict[str, int | float]


def train(job: Job, device: torch.device, checkpoints: Path | None = None) -> dict[str, Any]:
    """Run the job; returns "curve" (step, train_loss, test_loss, micro, macro), "parameters" and "seconds".

    AdamW with decay on weights only and cross-entropy over the scored tokens, at a constant learning rate after the
    warm-up: in MAD's own code the cosine schedule has no effect. A test a minute or more after the last checkpoint
    leaves another in the folder `place`: a stopped training goes on from there and ends with the same weights.
    """
    began = saved = perf_counter()
    setting, training = job.setting, job.training
    data = Data.of(setting, training, job.seed, device)
    vocab_size = build(setting.task, setting.settings).vocab_size
    with torch.random.fork_rng():
        torch.manual_seed(job.seed)
        model = build_backbone(setting.task, vocab_size, job.mixer, training, job.initialisation).to(device)
    optimiser = torch.optim.AdamW(parameter_groups(model, job.weight_decay), lr=job.learning_rate, fused=True)
    rise = max(1, round(training.warmup * setting.steps))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: min(1.0, (step + 1) / rise))
    tests = {round(setting.steps * part / training.checkpoints) for part in range(1, training.checkpoints + 1)}
    parts = {"model": model, "optimiser": optimiser, "schedule": schedule}
    measured: dict[str, Any] = (checkpoints and restore(checkpoints, parts, device)) or {"curve": [], "seconds": 0.0}
    curve, began = measured["curve"], began - measured["seconds"]
    done = curve[-1]["step"] if curve else 0
    batches = islice(data.batches(training.batch, job.seed), done, setting.steps)
    for step, (inputs, targets) in enumerate(batches, done + 1):
        if curve and training.enough is not None and curve[-1]["micro"] >= training.enough:
            break
        with torch.autocast(device.type, torch.bfloat16, enabled=training.bfloat16):
            logits = model(inputs)
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
        descend(loss, optimiser, schedule)
        if step in tests:
            curve.append({"step": step, "train_loss": loss.item(), **evaluate(model, data, training)})
            if checkpoints and perf_counter() - saved >= MINUTE:
                save(checkpoints, step, parts, {"curve": curve, "seconds": perf_counter() - began})
                saved = perf_counter()
    return {"curve": curve, "parameters": count_parameters(model), "seconds": perf_counter() - began}


@dataclass(frozen=True)
class Data:
    """Inputs and targets of both splits, on the device."""

    inputs: Int[Tensor, "n t"]
    targets: Int[Tensor, "n t"]
    test_inputs: Int[Tensor, "m t"]
    test_targets: Int[Tensor, "m t"]

    @classmethod
    def of(cls, setting: Setting, training: Training, seed: int, device: torch.device) -> Data:
        sizes = {"train": setting.train_examples, "test": training.test_examples}
        drawn = (generate(setting.task, n, seed, split, **setting.settings) for split, n in sizes.items())
        return cls(*(torch.from_numpy(array).to(device) for pair in drawn for array in pair))

    def batches(self, size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of epoch after epoch, each in another order; the last batch of an epoch may be smaller."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            for rows in torch.randperm(len(self.inputs), generator=generator).split(size):
                yield self.inputs[rows.to(self.inputs.device)], self.targets[rows.to(self.inputs.device)]


@torch.no_grad()
def evaluate(model: nn.Module, data: Data, training: Training) -> Point:
    """The mean loss and the `accuracies` over all scored tokens of the test."""
    batches = []
    for inputs, targets in zip(data.test_inputs.split(training.batch), data.test_targets.split(training.batch)):
        with torch.autocast(inputs.device.type, torch.bfloat16, enabled=training.bfloat16):
            logits = model(inputs).float()
        scored = targets != IGNORED
        losses = F.cross_entropy(logits[scored], targets[scored], reduction="none")
        batches.append((losses, logits[scored].argmax(-1), targets[scored]))
    own = [accuracy_of_batch(predictions, targets) for _, predictions, targets in batches]
    losses, predictions, targets = (torch.cat(parts) for parts in zip(*batches))
    return {"test_loss": losses.mean().item(), **accuracies(predictions, targets), "own": sum(own) / len(own)}


def accuracies(predictions: Int[Tensor, " n"], targets: Int[Tensor, " n"]) -> dict[str, float]:
    """micro: the share of targets that are predicted. macro: that share within each class, averaged over the classes
    that are targets.
    """
    hit = (predictions == targets).double()
    total = torch.bincount(targets)
    hits = torch.bincount(targets, weights=hit, minlength=len(total))
    return {"micro": hit.mean().item(), "macro": (hits[total > 0] / total[total > 0]).mean().item()}


def accuracy_of_batch(predictions: Int[Tensor, " n"], targets: Int[Tensor, " n"]) -> float:
    """MAD's own accuracy: the share of each class's targets that are predicted, 0 for a class that is only predicted,
    averaged over the classes of a batch. A few stray predictions of classes that are never targets halve it.
    """
    classes = int(torch.maximum(predictions.max(), targets.max())) + 1
    total, predicted = (torch.bincount(x, minlength=classes) for x in (targets, predictions))
    hits = torch.bincount(targets[predictions == targets], minlength=classes)
    there = (total > 0) | (predicted > 0)
    return (hits[there] / total[there].clamp(min=1)).mean().item()
