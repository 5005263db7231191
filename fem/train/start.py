"""The content of an output folder, which decides whether a training may begin or resume in it."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from fem.provenance import CONFIG, RESULTS, check_output, circumstances, note, now, read_json, write_json
from fem.train.checkpoints import STAGING, checkpoints, set_aside_after, step_of, to_go_on_from
from fem.train.recipe import TrainRecipe, differences

METRICS, COPY = "metrics.jsonl", "run"


@dataclass(frozen=True)
class Start:
    """Where a training begins: its checkpoint if it is resumed, and the content of config.json."""

    checkpoint: Path | None
    config: dict

    @property
    def step(self) -> int:
        return 0 if self.checkpoint is None else step_of(self.checkpoint)


def find_start(recipe: TrainRecipe, output: Path, resume: bool) -> Start:
    """Where in `output` a training of the recipe begins; writes nothing.

    Raises ValueError where it was begun with another recipe, needs --resume, or holds another experiment.
    """
    there = checkpoints(output)
    if not there or read_json(output / CONFIG) is not None:  # a checkpoint has a copy of one that is damaged
        check_output(output, "train")
    if there and not resume:
        raise ValueError(f"output holds {there[-1].name} already; add --resume auto, or choose another.")
    checkpoint = to_go_on_from(output)
    config = read_config(output, checkpoint)
    if config is None:
        config = {"experiment": "train", "recipe": asdict(recipe), "seed": recipe.seed, "data": None, "history": []}
        config["model_type"] = "fem"  # so that from_pretrained(output) asks FEMConfig, which says what to open
        return Start(None, config)
    if changed := differences(config["recipe"], recipe):
        begin = "" if there else ", or remove it to begin again"
        raise ValueError(
            f"the run in {str(output)!r} has another recipe: {', '.join(changed)}; choose another output{begin}."
        )
    return Start(checkpoint, config)


def read_config(output: Path, checkpoint: Path | None) -> dict | None:
    """The content of config.json, as the checkpoint's copy has it, which has a digest; None before a training begins.

    Raises ValueError where it is damaged and there is no checkpoint.
    """
    path = output / CONFIG
    config = read_json(path)
    readable = isinstance(config, dict) and isinstance(config.get("recipe"), dict)
    if checkpoint is not None:
        if not readable:
            note(f"{CONFIG} is missing or cannot be read; taken from {checkpoint.name}.")
        return json.loads((checkpoint / COPY / CONFIG).read_text(encoding="utf-8"))
    if config is not None and not readable:
        raise ValueError(f"{str(path)!r} has no recipe and no checkpoint has a copy; choose another output.")
    return config


def write_config(output: Path, config: dict) -> None:
    write_json(output / CONFIG, config | circumstances())


def add_event(config: dict, what: str, step: int) -> None:
    """Add to the history in config.json what makes this run differ from a run of its recipe."""
    config.setdefault("history", []).append({"step": step, "event": what, "date": now()})


def drop_later(output: Path, checkpoint: Path | None) -> None:
    """Remove from `output` whatever is later than the checkpoint that the run begins with."""
    shutil.rmtree(output / STAGING, ignore_errors=True)
    (output / RESULTS).unlink(missing_ok=True)
    (output / METRICS).unlink(missing_ok=True)
    if checkpoint is not None:
        set_aside_after(checkpoint)
        shutil.copyfile(checkpoint / COPY / METRICS, output / METRICS)


def read_metrics(output: Path) -> list[dict]:
    """The lines of metrics.jsonl that can be read: a kill may cut off the last, a power cut may damage others."""
    if not (output / METRICS).exists():
        return []
    metrics, broken = [], 0
    lines = (output / METRICS).read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    for line in lines:
        try:
            known = json.loads(line)
            metrics.append(known | {"step": int(known["step"])})
        except (ValueError, TypeError, KeyError):
            broken += line is not lines[-1]
    if broken:
        note(f"{METRICS} has {broken} damaged lines, which are left out.")
    return metrics


def copy_run(output: Path, checkpoint: Path) -> None:
    """Copy config.json and metrics.jsonl to the checkpoint, for when those in `output` are damaged."""
    (checkpoint / COPY).mkdir(exist_ok=True)
    for name in (CONFIG, METRICS):
        if (output / name).exists():
            shutil.copyfile(output / name, checkpoint / COPY / name)
