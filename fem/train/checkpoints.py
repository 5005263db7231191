"""Checkpoints in an output folder, which has one writer, and language models loaded from them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from fem.provenance import first_line, read_json

if TYPE_CHECKING:
    from torch import nn

LOCK = ".lock"
STAGING = ".saving"  # in the output folder: where a checkpoint is written before it is renamed
KEPT = 2  # checkpoints of a training that goes on by itself


def checkpoints(output: Path) -> list[Path]:
    """The folders `output`/checkpoint-N in the order of N."""
    folders = [p for p in output.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", p.name)]
    return sorted(folders, key=step_of)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def newest(output: Path) -> Path | None:
    """The newest checkpoint in `output`, which is whole: it was renamed once all of it was written."""
    return next(reversed(checkpoints(output)), None)


@contextmanager
def one_writer(folder: Path) -> Iterator[None]:
    """Hold the lock on `folder`, which the system releases when its process ends, however it ends.

    Raises ValueError where another process holds it.
    """
    try:
        with FileLock(folder / LOCK, timeout=0):
            yield
    except Timeout:
        told = f"another training writes to {str(folder)!r}; wait for it, or choose another output."
        raise ValueError(told) from None


def model_folder(folder: str | Path) -> Path:
    """The folder with the weights: `folder` itself, its newest checkpoint, or its subfolder `model`.

    Raises ValueError where none of them holds a model.
    """
    folder = Path(folder)
    if not folder.is_dir():
        what = "the file" if folder.is_file() else "no such folder"
        raise ValueError(f"model must be a folder with config.json and safetensors, got {what} {str(folder)!r}.")
    places = (folder, newest(folder) or folder, folder / "model")  # `fem demo` saves it in the third
    for place in places:
        config = read_json(place / "config.json") or {}
        if "model_type" in config and "recipe" not in config:  # which a training's own has
            return place
    raise ValueError(f"model must hold a config.json with a model_type, got {str(folder)!r} without one.")


def not_finite(model: nn.Module) -> str | None:
    """The name of the first parameter that holds NaN or infinity, or None."""
    return next((name for name, x in model.named_parameters() if not x.isfinite().all()), None)


@contextmanager
def readable(what: str, advice: str = "it may be missing, corrupt or cut off") -> Iterator[None]:
    """Raises ValueError, in one sentence, where a library cannot read `what`: these raise errors of many classes."""
    try:
        yield
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise ValueError(f"{what} brings code of its own: fem runs none.") from error
        raise ValueError(f"{what} cannot be read, {advice}: {first_line(error)}") from error


def load_language_model(folder: str | Path):
    """The model and the tokenizer in `folder`, a saved model or the output of `fem train`.

    Raises ValueError where files are missing, cut off or corrupt, where weights are missing or not finite, and where
    model and tokenizer do not belong together.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

    import fem.models  # noqa: F401  (the Auto classes)
    from fem.train.model import know
    from fem.train.tokenizer import entries

    path = model_folder(folder)
    know(read_json(path / "config.json")["model_type"])  # imports the library that registers it
    options = {"use_safetensors": True, "dtype": "auto", "trust_remote_code": False, "output_loading_info": True}
    with readable(f"the model in {str(path)!r}"):
        model, report = AutoModelForCausalLM.from_pretrained(path, **options)
    if missing := sorted(report["missing_keys"]):
        raise ValueError(
            f"the weights in {str(path)!r} must be all that its config.json asks for; {missing[0]!r} is missing."
        )
    if (name := not_finite(model)) is not None:
        raise ValueError(f"the weights in {str(path)!r} must be finite, got NaN or infinity in {name!r}.")
    saved = [*path.glob("*token*"), *path.glob("vocab*"), *path.glob("*.model")]
    if not saved:  # some classes of tokenizers can be made of no file, and are empty
        raise ValueError(f"{str(path)!r} holds no tokenizer beside the model; save one there.")
    with readable(f"the tokenizer in {str(path)!r}"):
        named = (read_json(path / "tokenizer_config.json") or {}).get("tokenizer_class")
        # AutoTokenizer makes a Qwen2Tokenizer of any beside a qwen2
        opener = PreTrainedTokenizerFast if named == "TokenizersBackend" else AutoTokenizer
        tokenizer = opener.from_pretrained(path, trust_remote_code=False)
    if (size := entries(tokenizer)) > model.config.vocab_size:
        raise ValueError(
            f"tokenizer and model do not belong together: token ids up to {size - 1}, but vocab_size = "
            f"{model.config.vocab_size} in {str(path)!r}."
        )
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval(), tokenizer
