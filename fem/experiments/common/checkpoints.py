"""Checkpoints that are there whole or not at all, and language models read back from them."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

from fem.experiments.common.run import write_json

MANIFEST = "complete.json"
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


def publish(staging: Path, target: Path) -> None:
    """Make the files in `staging` the checkpoint `target`: written out to disk, listed, then renamed in one step."""
    files = sorted(path for path in staging.rglob("*") if path.is_file())
    for path in files:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    write_json(staging / MANIFEST, {str(path.relative_to(staging)): path.stat().st_size for path in files})
    if target.exists():
        shutil.rmtree(target)
    os.replace(staging, target)


def complete(checkpoint: Path) -> bool:
    """Whether every file that was saved is there, in its full length."""
    try:
        sizes = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
        return all((checkpoint / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False


def checkpoints(output: Path) -> list[Path]:
    """The folders `output`/checkpoint-N, by N, complete or not."""
    found = [p for p in output.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", p.name)]
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def newest(output: Path) -> Path | None:
    """The newest complete checkpoint in `output`."""
    return next((checkpoint for checkpoint in reversed(checkpoints(output)) if complete(checkpoint)), None)


def model_folder(folder: str | Path) -> Path:
    """Where the weights are: `folder` itself, or its newest complete checkpoint.

    Raises ValueError where neither holds a model in safetensors.
    """
    folder = Path(folder)
    if folder.is_file() or not folder.exists():
        pickle = f" {folder.suffix} files may run code when they are read." if folder.suffix in PICKLES else ""
        what = "the file" if folder.is_file() else "no such folder"
        raise ValueError(
            f"model must be a folder with config.json and safetensors, got {what} {str(folder)!r}.{pickle}"
        )
    found = folder if _of_a_model(folder) else newest(folder)
    if found is None:
        cut_off = ", but only checkpoints that were cut off" if checkpoints(folder) else ""
        raise ValueError(f"model must hold config.json and safetensors, got {str(folder)!r} without them{cut_off}.")
    if not any((found / name).exists() for name in WEIGHTS):
        pickles = [path.name for path in found.glob("*model*") if path.suffix in PICKLES]
        unsafe = f" but with {pickles[0]}, which may run code when it is read; convert it" if pickles else ""
        raise ValueError(f"model must hold its weights as safetensors, got {str(found)!r} without them{unsafe}.")
    return found


def _of_a_model(folder: Path) -> bool:
    try:
        return "model_type" in json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False


def load_language_model(folder: str | Path):
    """The model and the tokenizer in `folder`, a saved model or the output of `fem train`.

    Raises ValueError where files are missing, cut off or corrupt, and where model and tokenizer do not belong together.
    """
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from fem.models import load_replaced
    from fem.models.surgery.checkpoint import RECORD

    found = model_folder(folder)
    replaced = RECORD in json.loads((found / "config.json").read_text(encoding="utf-8"))
    load = load_replaced if replaced else AutoModelForCausalLM.from_pretrained
    try:
        model = load(found, use_safetensors=True, dtype="auto")
    except (SafetensorError, RuntimeError, OSError, KeyError, json.JSONDecodeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"the model in {str(found)!r} cannot be read, it may be corrupt or cut off: {reason}"
        ) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(found)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{str(found)!r} holds no tokenizer beside the model; save one there.") from error
    if len(tokenizer) > model.config.vocab_size:
        raise ValueError(
            f"tokenizer and model do not belong together: {len(tokenizer)} entries, but vocab_size = "
            f"{model.config.vocab_size} in {str(found)!r}."
        )
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval(), tokenizer
