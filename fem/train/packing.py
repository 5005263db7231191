"""Rows of equal length, packed with documents, from tokens on the disk in a seeded order.

A row is {"input_ids", "labels", "segment_ids"}, each (context,). A document that does not fit continues in the next
row; segment ids count the documents of the row; the first token of each is not a target (-100). Where documents are
visible there are no segment ids, and every token but the row's first is a target. Rows can start at any step without
reading what came before it.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset
from transformers import PreTrainedTokenizerFast

from fem.models.loss import IGNORED
from fem.provenance import note, read_json
from fem.train.integrity import MANIFEST, damage, publish
from fem.train.pieces import Part

Row = dict[str, Tensor]
AT_ONCE = 2_000_000  # characters, whose encodings take some 250 MB
SOURCE, STREAM = "source.json", "stream.json"
SECONDS_A_NOTE = 10.0


def packed(ids: np.ndarray, opens: np.ndarray, visible: bool = False) -> Row:
    """The row of these tokens; `opens` marks those that begin a document, to which the row's first is added.

    visible: a token sees the row's documents before its own.
    """
    opens = np.zeros_like(opens) if visible else opens.copy()
    opens[0] = True
    ids = ids.astype(np.int64)
    labels = np.where(opens, IGNORED, ids)
    row = {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}
    return row if visible else row | {"segment_ids": torch.from_numpy(np.cumsum(opens))}


@dataclass(frozen=True)
class TokenFile:
    """The tokens (N,) of all documents on disk, each followed by an end token, and where documents end (documents,)."""

    tokens: np.ndarray
    ends: np.ndarray

    def span(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """The tokens from `begin` to `end`, and which of them begin a document."""
        first, last = np.searchsorted(self.ends, (begin, end))
        opens = np.zeros(end - begin, bool)
        opens[self.ends[first:last] - begin] = True
        opens[0] |= begin == 0
        return self.tokens[begin:end], opens


@dataclass(frozen=True)
class Tokens:
    """Files of tokens, one behind the other.

    limits: how many tokens the first request took, how many the second that extended it, ...; the last has all.
    """

    files: list[TokenFile]
    limits: list[int]

    @classmethod
    def open(cls, folder: Path) -> Tokens:
        """The tokens that `write_tokens` wrote to a folder, or those of a dataset of the hub (`hub`)."""
        stream = read_json(folder / STREAM)
        if stream is None:
            file = TokenFile(np.memmap(folder / "tokens.bin", np.uint32, "r"), np.load(folder / "ends.npy"))
            return cls([file], [len(file.tokens)])
        paths = [shard_paths(folder, index)[:2] for index in range(stream["files"])]
        files = [
            TokenFile(np.memmap(tokens, np.uint32, "r"), np.memmap(ends, np.int64, "r"))
            for tokens, ends in paths
            if tokens.exists() and ends.stat().st_size
        ]
        total = sum(len(file.tokens) for file in files)
        return cls(files, [min(limit, total) for limit in stream["limits"]])

    def row(self, index: int, context: int, visible: bool = False) -> Row:
        begin, end = index * context, (index + 1) * context
        parts, start = [], 0
        for file in self.files:
            first, last = max(begin - start, 0), min(end - start, len(file.tokens))
            if first < last:
                parts.append(file.span(first, last))
            start += len(file.tokens)
        ids, opens = map(np.concatenate, zip(*parts))
        return packed(ids, opens, visible)

    def rows(self, context: int) -> int:
        return self.limits[-1] // context


def shard_paths(folder: Path, index: int) -> tuple[Path, Path, Path]:
    """Where the tokens of one file of a dataset, the ends of its documents and their numbers are."""
    return tuple(folder / f"{index:05d}.{kind}" for kind in ("bin", "ends", "json"))


def sound(folder: Path, source: Any) -> bool:
    """Whether the folder holds whole tokens of the source; a note says so where they are damaged.

    Raises ValueError where it was written from another source.
    """
    if not folder.exists():
        return False
    problem = damage(folder)
    listed = (folder / MANIFEST).exists()
    if read_json(folder / SOURCE) != source and (problem is None or not listed):
        raise ValueError(f"data have changed since {str(folder)!r} was written; give another --output.")
    if problem is not None:
        note(f"the tokens in {str(folder)!r} are damaged ({problem}); writing them again from the data.")
    return problem is None


def write_tokens(
    documents: Iterator[str],
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    source: Any,
) -> Tokens:
    """Write the documents' tokens to `folder` in one step, or open what an earlier call wrote there.

    source: identifies the documents and the tokenizer. Damaged tokens are written again, with a note; whether `source`
    is the one that a run began with is for its config.json to say. A note says every ten seconds how far it is.
    Raises ValueError where the folder was written from another source, or where the documents have no text.
    """
    if sound(folder, source):
        return Tokens.open(folder)
    staging = folder.with_name(f".{folder.name}")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    ends, total, due = [], 0, time.monotonic() + SECONDS_A_NOTE
    with open(staging / "tokens.bin", "wb") as file:
        for ids, ended in tokens_of(documents, tokenizer):
            file.write(ids.tobytes())
            total += len(ids)
            if ended:
                ends.append(total)
            if time.monotonic() > due:
                note(f"tokenising: {total:,} tokens so far.")
                due = time.monotonic() + SECONDS_A_NOTE
    if total == len(ends):
        raise ValueError("data must not be empty, got documents without a token.")
    np.save(staging / "ends.npy", np.array(ends, np.int64))
    (staging / SOURCE).write_text(json.dumps(source), encoding="utf-8")
    publish(staging, folder)
    return Tokens.open(folder)


def tokens_of(documents: Iterable[str], tokenizer: PreTrainedTokenizerFast) -> Iterator[tuple[np.ndarray, bool]]:
    """The tokens of every piece, and whether its document ends with it."""
    for batch in batches(documents):
        for piece, ids in zip(batch, encode(batch, tokenizer)):
            goes_on = isinstance(piece, Part)
            yield (ids[:-1] if goes_on else ids), not goes_on


def batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """Lists of some texts, taken only when they are asked for."""
    batch, size = [], 0
    for text in texts:
        batch.append(text)
        size += len(text) + 1
        if size >= AT_ONCE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def encode(documents: list[str], tokenizer: PreTrainedTokenizerFast) -> Iterator[np.ndarray]:
    """Each document's tokens and an end token. Special tokens that are spelt out in the text are read as text, and the
    truncation and padding that a tokenizer was saved with are left out."""
    backend = tokenizer.backend_tokenizer
    backend.encode_special_tokens = True
    backend.no_truncation()
    backend.no_padding()
    for encoding in backend.encode_batch_fast(documents, add_special_tokens=False):
        yield np.array([*encoding.ids, tokenizer.eos_token_id], np.uint32)


@dataclass(frozen=True)
class Share:
    """The part of every batch that one process reads: micro-batches are dealt to the processes in turn."""

    rows: int  # per batch, over all processes
    micro: int  # per forward pass of one process
    rank: int = 0
    world: int = 1

    def __post_init__(self):
        if self.rows % (self.micro * self.world):
            raise ValueError(
                f"batch_size must be a multiple of micro_batch x processes = {self.micro} x {self.world}, "
                f"got {self.rows}."
            )

    @property
    def accumulation(self) -> int:
        """Forward passes of one process per step."""
        return self.rows // (self.micro * self.world)

    def numbers(self, step: int) -> Iterator[int]:
        """The endless sequence of this process's row numbers from `step` on, counted over all processes."""
        for micro in count(step * self.accumulation):
            first = (micro * self.world + self.rank) * self.micro
            yield from range(first, first + self.micro)


class ShuffledRows(IterableDataset):
    """The rows of the stretches from `step` on, in another order every epoch; batches are equal for any number of
    processes. A stretch is shuffled by itself, behind those before it, whose order does not change where one is added.
    """

    def __init__(
        self,
        tokens: Tokens,
        context: int,
        stretches: Sequence[range],
        share: Share,
        seed: int,
        visible: bool = False,
    ):
        self.tokens, self.context, self.stretches = tokens, context, tuple(stretches)
        self.share, self.seed, self.visible = share, seed, visible
        self.step = 0

    def __iter__(self) -> Iterator[Row]:
        for number in self.share.numbers(self.step):
            epoch, index = divmod(number, sum(map(len, self.stretches)))
            row = int(_order(self.stretches, self.seed, epoch)[index])
            yield self.tokens.row(row, self.context, self.visible)


@lru_cache(maxsize=2)
def _order(stretches: tuple[range, ...], seed: int, epoch: int) -> np.ndarray:
    return np.concatenate(
        [
            rows.start + np.random.default_rng((seed, epoch, number)).permutation(len(rows))
            for number, rows in enumerate(stretches)
        ]
    )
