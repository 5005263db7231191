"""Trainings in a plain loop: one step, and checkpoints of the states of its parts and of what it has measured."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from fem.provenance import first_line
from fem.train import checkpoints
from fem.train.checkpoints import KEPT, STAGING

STATE = "state.pt"


def descend(
    loss: Tensor, optimiser: torch.optim.Optimizer, schedule: LRScheduler | None = None, clip: float | None = None
) -> None:
    """One step of the optimiser and of its schedule; with `clip`, gradients of a larger norm are scaled down to it."""
    optimiser.zero_grad()
    loss.backward()
    if clip is not None:
        nn.utils.clip_grad_norm_([p for group in optimiser.param_groups for p in group["params"]], clip)
    optimiser.step()
    if schedule is not None:
        schedule.step()


def save(folder: Path, number: int, parts: Mapping[str, Any], measured: Mapping[str, Any]) -> None:
    """Write `folder`/checkpoint-NUMBER: the `state_dict` of every part, and what was measured; the newest two stay."""
    staging = folder / STAGING
    shutil.rmtree(staging, ignore_errors=True)
    try:
        staging.mkdir(parents=True)
        torch.save({name: part.state_dict() for name, part in parts.items()} | measured, staging / STATE)
        staging.replace(folder / f"checkpoint-{number}")
    except (OSError, RuntimeError) as error:  # torch's writer raises RuntimeError, and names no file
        shutil.rmtree(staging, ignore_errors=True)
        reason = error if isinstance(error, OSError) else f"is the disk full? ({first_line(error)})"
        raise OSError(f"checkpoint-{number} could not be saved in {str(folder)!r}: {reason}") from error
    for old in checkpoints.checkpoints(folder)[:-KEPT]:
        shutil.rmtree(old)


def restore(folder: Path, parts: Mapping[str, Any], device: torch.device) -> dict[str, Any] | None:
    """Load the newest checkpoint into the parts; returns what was measured, None where there is none."""
    newest = checkpoints.newest(folder)
    if newest is None:
        return None
    try:
        saved = torch.load(newest / STATE, device, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(saved.pop(name))
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, pickle.UnpicklingError) as error:
        told = f"{str(newest)!r} is damaged, or another version's; remove it to go on from the one before."
        raise ValueError(told) from error
    return saved
