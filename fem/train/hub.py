"""A dataset of the hub: streamed by `datasets`, and its tokens kept on the disk as they come, up to a limit.

A folder of such tokens holds of file i of the dataset `i.bin` (tokens, uint32), `i.ends` (where its documents end,
int64) and `i.json` (how many of both are on the disk, and the stream's place behind them); stream.json has the revision
of the dataset, its number of files and the limits. What a kill left behind the counts is cut off. The files' tokens
stand in the order of the files, so that they are the same from any number of processes and interruptions.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from datasets import IterableDataset, load_dataset
from transformers import PreTrainedTokenizerFast

from fem.provenance import first_line, note, read_json, sync, write_json
from fem.train.distributed import Paused
from fem.train.documents import text_of
from fem.train.integrity import publish
from fem.train.packing import SECONDS_A_NOTE, SOURCE, STREAM, batches, shard_paths, sound, tokens_of
from fem.train.pieces import pieces
from fem.train.recipe import TrainRecipe

SECONDS = 6.0  # for the hub to connect, and to answer
NOTHING = {"tokens": 0, "documents": 0, "state": None, "finished": False}


def way_to_the_hub() -> None:
    """Raises OSError if the hub cannot be reached, or if HF_HUB_OFFLINE forbids it. The hub is asked once: its client
    asks again and again, for minutes."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        raise OSError("HF_HUB_OFFLINE is set, so the hub is not asked")
    try:
        get_session().head(constants.ENDPOINT, timeout=SECONDS)
    except Exception as error:
        raise OSError(f"no way to {constants.ENDPOINT} within {SECONDS:g} seconds ({first_line(error)})") from error


def newest_revision(name: str) -> str | None:
    """The commit at which the hub has the dataset now."""
    from huggingface_hub import HfApi

    way_to_the_hub()
    return HfApi().dataset_info(name, timeout=SECONDS).sha


def begin(recipe: TrainRecipe, folder: Path, source: Any) -> None:
    """Where tokens are missing in `folder`, make `staging(folder)`, to which `write_shards` is to add them.

    Raises ValueError where the folder was written from another source, where there is no such dataset or where the hub
    cannot be reached.
    """
    staged = staging(folder)
    if sound(folder, source):
        stream = read_json(folder / STREAM)
        if stream is None or stream["limits"][-1] >= recipe.tokens or _tokens(folder, stream["files"])[1]:
            return
        shutil.rmtree(staged, ignore_errors=True)
        os.replace(folder, staged)
    elif read_json(staged / SOURCE) != source:
        shutil.rmtree(staged, ignore_errors=True)
        try:
            revision = newest_revision(recipe.data)
            stream = open_stream(recipe, revision)
            first = next(iter(stream), None)
        except Exception as error:
            told = f"data must be a file, a folder or a dataset of the hub, got {recipe.data!r}: {first_line(error)}"
            raise ValueError(told) from error
        text_of(first, recipe.field, "every record")
        staged.mkdir(parents=True)
        write_json(staged / STREAM, {"revision": revision, "files": stream.num_shards, "limits": []})
        write_json(staged / SOURCE, source)


def staging(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}")


def open_stream(recipe: TrainRecipe, revision: str | None) -> IterableDataset:
    """The training split of the recipe's dataset, read as it comes."""
    return load_dataset(recipe.data, recipe.subset, split="train", streaming=True, revision=revision)


def write_shards(recipe: TrainRecipe, folder: Path, tokenizer: PreTrainedTokenizerFast, rank: int, world: int) -> None:
    """Add to `staging(folder)` the tokens of every `world`-th file from `rank` on, until all files before and the
    present one have the recipe's tokens. Another call goes on where this one was interrupted.

    Raises `Paused` where the hub no longer answers, ValueError where a record has no text.
    """
    staged = staging(folder)
    known = read_json(staged / STREAM)
    stream = None
    said = Said(recipe.tokens, _tokens(staged, known["files"])[0])
    for index in range(rank, known["files"], world):
        if _tokens(staged, index)[0] >= recipe.tokens:
            return
        if not _counts(staged, index)["finished"]:
            with reading(recipe, staged, known["files"]):
                stream = stream or open_stream(recipe, known["revision"])
            shard = stream.shard(known["files"], index)
            _write_shard(recipe, staged, shard, index, tokenizer, said, known["files"])


@dataclass
class Said:
    """The note that says every ten seconds how far the tokens are."""

    limit: int
    begun: int
    since: float = field(default_factory=time.monotonic)

    def now(self, total: int) -> None:
        speed = (total - self.begun) / max(1e-9, time.monotonic() - self.since)
        left = max(0, self.limit - total) / max(1.0, speed) / 60
        note(f"tokenising: {total:,} of {self.limit:,} tokens, {speed:,.0f} a second, {left:,.0f} minutes left.")


def _write_shard(
    recipe: TrainRecipe,
    staged: Path,
    shard: IterableDataset,
    index: int,
    tokenizer: PreTrainedTokenizerFast,
    said: Said,
    files: int,
) -> None:
    tokens_path, ends_path, counts_path = shard_paths(staged, index)
    counts = _counts(staged, index)
    if counts["state"] is not None:
        shard.load_state_dict(counts["state"])
    with open(tokens_path, "ab") as tokens, open(ends_path, "ab") as ends:
        tokens.truncate(4 * counts["tokens"])
        ends.truncate(8 * counts["documents"])

        def save() -> None:
            for file in (tokens, ends):
                file.flush()
                sync(Path(file.name))
            counts["state"] = shard.state_dict()
            write_json(counts_path, counts)

        texts = (text_of(record, recipe.field, "every record") for record in _records(recipe, shard, staged, files))
        wanted, due = recipe.tokens - _tokens(staged, index)[0], time.monotonic() + SECONDS_A_NOTE
        for batch in batches(texts):
            for ids, ended in tokens_of(chain.from_iterable(map(pieces, batch)), tokenizer):
                tokens.write(ids.tobytes())
                counts["tokens"] += len(ids)
                if ended:
                    ends.write(np.int64(counts["tokens"]).tobytes())
                    counts["documents"] += 1
            if counts["tokens"] >= wanted or time.monotonic() > due:
                save()
                wanted, due = recipe.tokens - _tokens(staged, index)[0], time.monotonic() + SECONDS_A_NOTE
                said.now(_tokens(staged, files)[0])
                if counts["tokens"] >= wanted:
                    return
        counts["finished"] = True
        save()


@contextmanager
def reading(recipe: TrainRecipe, staged: Path, files: int) -> Iterator[None]:
    """In this block, a hub that no longer answers raises `Paused`; `datasets` has asked it for minutes by then."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise ValueError(f"data must be whole files, got {recipe.data!r} with another: {first_line(error)}") from error
    except Exception as error:
        kept = f"{_tokens(staged, files)[0]:,} tokens are saved"
        raise Paused(f"{recipe.data!r} can no longer be read ({first_line(error)}); {kept}") from error


def _records(recipe: TrainRecipe, shard: IterableDataset, staged: Path, files: int) -> Iterator[dict]:
    with reading(recipe, staged, files):
        yield from shard


def _counts(folder: Path, index: int) -> dict:
    """What of a file of the dataset is on the disk, and the place behind it."""
    return read_json(shard_paths(folder, index)[2]) or dict(NOTHING)


def _tokens(folder: Path, files: int) -> tuple[int, bool]:
    """How many tokens of the first `files` files are on the disk, and whether these are all that the files have."""
    counts = [_counts(folder, index) for index in range(files)]
    return sum(known["tokens"] for known in counts), all(known["finished"] for known in counts)


def finish(recipe: TrainRecipe, folder: Path) -> None:
    """Turn `staging(folder)` into `folder`, without the files behind the recipe's tokens.

    Raises ValueError where the documents have no text.
    """
    staged = staging(folder)
    stream = read_json(staged / STREAM)
    for index in range(stream["files"]):
        if _tokens(staged, index)[0] >= recipe.tokens:
            for path in shard_paths(staged, index):
                path.unlink(missing_ok=True)
    counts = [_counts(staged, index) for index in range(stream["files"])]
    if sum(known["tokens"] - known["documents"] for known in counts) == 0:
        raise ValueError(f"data must not be empty, got {recipe.data!r}, documents without a token.")
    if recipe.tokens > max(stream["limits"], default=0):
        stream["limits"].append(recipe.tokens)
    write_json(staged / STREAM, stream)
    publish(staged, folder)
