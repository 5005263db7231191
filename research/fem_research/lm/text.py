"""Text for a language model: documents in, a tokenizer and blocks of tokens out."""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from datasets import Dataset
from transformers import PreTrainedTokenizerFast

from fem.train.data import pieces
from fem.train.tokenizer import END, train_tokenizer

HELD_OUT = 0.05
NO_SOURCES = {"site-packages", "dist-packages", "test", "tests", "idle_test", "_bundled", "lib2to3", "encodings"}
NO_SOURCES |= {"pydoc_data"}  # its topics are read by `help_topics`


@dataclass(frozen=True)
class Corpus:
    """A tokenizer, and blocks of `context` tokens to train on and to validate on: {"input_ids", "labels"}."""

    tokenizer: PreTrainedTokenizerFast
    train: Dataset
    validation: Dataset
    bytes_per_token: float  # of the held-out text


def build_corpus(text: Path | list[str] | None, vocabulary: int, context: int) -> Corpus:
    """A corpus from a text file, documents, or (None) Python's own; the tokenizer is trained on its training part."""
    documents = list(python_documents()) if text is None else text if isinstance(text, list) else [read_text(text)]
    train, held_out = _split(documents)
    tokenizer = train_tokenizer((piece for document in train for piece in pieces(document)), vocabulary)
    streams = [_tokens(part, tokenizer) for part in (train, held_out)]
    for name, stream in zip(("training", "held-out"), streams):
        if len(stream) < context:
            raise ValueError(
                f"text is too short: its {name} part has {len(stream)} tokens, one context needs {context}; "
                "give a longer text or a smaller context."
            )
    size = sum(len(document.encode()) for document in held_out)
    return Corpus(tokenizer, *(_blocks(stream, context) for stream in streams), size / len(streams[1]))


def source_name(text: Path | None) -> str:
    """The name of the text of `build_corpus` on a page."""
    return "the sources and help topics of Python" if text is None else text.name


def python_documents() -> Iterator[str]:
    """The standard library's sources, without tests and tables, and the topics of `help()`."""
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        if not set(path.relative_to(library).parts) & NO_SOURCES:
            yield path.read_text(encoding="utf-8", errors="replace")
    yield from help_topics()


def help_topics() -> list[str]:
    """The topics of Python's `help()`, half a megabyte of English; empty where this Python has none."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return []
    return list(topics.values())


def read_text(path: Path) -> str:
    """The text of a file. Raises ValueError on a file that is missing, empty or binary."""
    if not path.is_file():
        raise ValueError(f"text must be a file that exists, got {str(path)!r}.")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"text must be UTF-8, got {str(path)!r} with other bytes.") from error
    if "\0" in text:
        raise ValueError(f"text must be plain text, got {str(path)!r} with zero bytes: it looks binary.")
    if not text.strip():
        raise ValueError(f"text must not be empty, got {str(path)!r}, which holds nothing but white space.")
    return text


def _split(documents: list[str]) -> tuple[list[str], list[str]]:
    """Training and held-out documents; a single document is cut in two."""
    if len(documents) == 1:
        cut = round((1 - HELD_OUT) * len(documents[0]))
        return [documents[0][:cut]], [documents[0][cut:]]
    shuffled = random.Random(0).sample(documents, len(documents))
    cut = max(1, round(HELD_OUT * len(documents)))
    return shuffled[cut:], shuffled[:cut]


def _tokens(documents: list[str], tokenizer: PreTrainedTokenizerFast) -> np.ndarray:
    encode = tokenizer.backend_tokenizer.encode_batch_fast
    encoded = (encode([piece])[0].ids for document in documents for piece in pieces(document + END))
    return np.concatenate([np.asarray(ids, dtype=np.int64) for ids in encoded])


def _blocks(stream: np.ndarray, context: int) -> Dataset:
    blocks = stream[: len(stream) // context * context].reshape(-1, context)
    return Dataset.from_dict({"input_ids": blocks, "labels": blocks}).with_format("torch")
