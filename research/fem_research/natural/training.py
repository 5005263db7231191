"""One part of a set: the learning rate is chosen and the model is trained on the other parts, then it answers."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Generator, Tensor

from fem_research.common.blocks import count_parameters
from fem_research.common.pools import BagModel
from fem_research.natural.data import Bags, bags
from fem_research.natural.settings import Job

INNER = 4  # of as many parts of the training bags, one chooses the learning rate


def parts(label: Int[Tensor, " n"], folds: int, seed: int) -> Int[Tensor, " n"]:
    """Which part every bag is in: bags in random order are dealt out class by class, so that all have their shares."""
    order = torch.randperm(len(label), generator=Generator().manual_seed(seed))
    dealt = order[label[order].argsort(stable=True)]
    part = torch.empty_like(label)
    part[dealt] = torch.arange(len(label)) % folds
    return part


def standardised(data: Bags, of: Int[Tensor, " n"]) -> Bags:
    """Features with mean 0 and standard deviation 1 over the elements of these bags; constant ones become 0."""
    elements = data.x[of][data.keep[of]]
    x = (data.x - elements.mean(0)) / elements.std(0).clamp_min(1e-6)
    return Bags(x * data.keep[..., None], data.keep, data.label)


def cut(data: Bags, of: Int[Tensor, " n"]) -> tuple[Tensor, Tensor, Tensor]:
    """These bags, no longer than the longest of them."""
    longest = int(data.keep[of].sum(1).max())
    return data.x[of, :longest], data.keep[of, :longest], data.label[of]


def fit(data: Bags, of: Int[Tensor, " n"], job: Job, rate: float) -> BagModel:
    """The job's model, trained on these bags: AdamW without weight decay, the rate falls linearly to 0."""
    own = job.training
    torch.manual_seed(1000 * job.seed + job.fold)
    model = BagModel(
        data.x.shape[-1], data.classes, job.pool, own["width"], own["heads"], own["mlp_width"], own["initialisation"]
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0, fused=True)
    for step in range(own["steps"]):
        optimizer.param_groups[0]["lr"] = rate * (1 - step / own["steps"])
        x, keep, label = cut(data, of[torch.randperm(len(of))[: own["batch"]]])
        optimizer.zero_grad()
        F.cross_entropy(model(x, keep)[:, 0], label).backward()
        optimizer.step()
    return model


@torch.no_grad()
def answers(model: BagModel, data: Bags, of: Int[Tensor, " n"]) -> tuple[Tensor, float]:
    """Which of these bags are answered rightly, and the mean cross-entropy."""
    x, keep, label = cut(data, of)
    said = model(x, keep)[:, 0]
    return said.argmax(-1) == label, F.cross_entropy(said, label).item()


def train(job: Job, device: torch.device, place: Path | None = None, *, folder: Path | None = None) -> dict:
    """Run the job; `place` stays empty, as a job takes seconds."""
    began = perf_counter()
    data = bags(job.name, folder)
    part = parts(data.label, job.folds, job.seed)
    seen, tested = (part != job.fold).nonzero()[:, 0], (part == job.fold).nonzero()[:, 0]
    data = standardised(data, seen)
    inner = parts(data.label[seen], INNER, job.seed)
    with torch.random.fork_rng():
        tried = {rate: answers(fit(data, seen[inner > 0], job, rate), data, seen[inner == 0])[1] for rate in job.rates}
        best = min(tried, key=tried.__getitem__)
        model = fit(data, seen, job, best)
    right, loss = answers(model, data, tested)
    return {
        "curve": [{"step": job.training["steps"], "accuracy": right.float().mean().item(), "loss": loss}],
        "bags": tested.tolist(),
        "right": right.int().tolist(),
        "learning_rate": best,
        "validation_by_rate": {f"{rate:g}": loss for rate, loss in tried.items()},
        "parameters": count_parameters(model),
        "seconds": perf_counter() - began,
    }
