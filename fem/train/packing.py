"""Rows of equal length, packed with documents, from a file of tokens in a seeded order.

A row is {"input_ids", "labels", "segment_ids"}, each (context,). A document that does not fit continues in the next
row; segment ids count the documents of the row; the first token of each is not a target (-100). Where documents are
visible there are no segment ids, and every token but the row's first is a target. Rows can start at any step without
reading what came before it.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset
from transformers import PreTrainedTokenizerFast

from fem.models.loss import IGNORED
from fem.runs.run import note, read_json
from fem.train.integrity import MANIFEST, damage, publish
from fem.train.pieces import Part

Row = dict[str, Tensor]
PIECES_AT_ONCE = 32  # 2 million characters at most, whose encodings take some 250 MB
SOURCE = "source.json"
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

    @classmethod
    def open(cls, folder: Path) -> TokenFile:
        return cls(np.memmap(folder / "tokens.bin", np.uint32, "r"), np.load(folder / "ends.npy"))

    def row(self, index: int, context: int, visible: bool = False) -> Row:
        begin, end = index * context, (index + 1) * context
        first, last = np.searchsorted(self.ends, (begin + 1, end))
        opens = np.zeros(context, bool)
        opens[self.ends[first:last] - begin] = True
        return packed(self.tokens[begin:end], opens, visible)

    def rows(self, context: int) -> int:
        return len(self.tokens) // context


def write_tokens(
    documents: Iterator[str],
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    source: Any,
) -> TokenFile:
    """Write the documents' tokens to `folder` in one step, or open what an earlier call wrote there.

    source: identifies the documents and the tokenizer. Damaged tokens are written again, with a note; whether `source`
    is the one that a run began with is for its config.json to say. A note says every ten seconds how far it is.
    Raises ValueError where the folder was written from another source, or where the documents have no text.
    """
    if folder.exists():
        problem = damage(folder)
        listed = (folder / MANIFEST).exists()
        if read_json(folder / SOURCE) != source and (problem is None or not listed):
            raise ValueError(f"data have changed since {str(folder)!r} was written; give another --output.")
        if problem is None:
            return TokenFile.open(folder)
        note(f"the tokens in {str(folder)!r} are damaged ({problem}); writing them again from the data.")
    staging = folder.with_name(f".{folder.name}")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    ends, total, due = [], 0, time.monotonic() + SECONDS_A_NOTE
    with open(staging / "tokens.bin", "wb") as file:
        while batch := list(islice(documents, PIECES_AT_ONCE)):
            for piece, ids in zip(batch, encode(batch, tokenizer)):
                ids = ids[:-1] if isinstance(piece, Part) else ids
                file.write(ids.tobytes())
                total += len(ids)
                if not isinstance(piece, Part):
                    ends.append(total)
            if time.monotonic() > due:
                note(f"tokenising: {total:,} tokens so far.")
                due = time.monotonic() + SECONDS_A_NOTE
    if total == len(ends):
        raise ValueError("data must not be empty, got documents without a token.")
    np.save(staging / "ends.npy", np.array(ends, np.int64))
    (staging / SOURCE).write_text(json.dumps(source), encoding="utf-8")
    publish(staging, folder)
    return TokenFile.open(folder)


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
    """The first `rows` rows of a file from `step` on, in another order every epoch; batches are equal for any number of
    processes."""

    def __init__(self, file: TokenFile, context: int, rows: int, share: Share, seed: int, visible: bool = False):
        self.file, self.context, self.rows, self.share, self.seed = file, context, rows, share, seed
        self.visible = visible
        self.step = 0

    def __iter__(self) -> Iterator[Row]:
        for number in self.share.numbers(self.step):
            epoch, index = divmod(number, self.rows)
            yield self.file.row(int(_order(self.rows, self.seed, epoch)[index]), self.context, self.visible)


@lru_cache(maxsize=2)
def _order(rows: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(rows)
