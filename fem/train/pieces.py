"""Long texts in pieces, so that memory is bounded by the piece and not by the text.

A piece ends before a single space or line break between two visible characters, where byte-pair tokenizers separate
words anyway: its tokens are those of the whole text. Where there is no such place (nothing but white space, or an
endless word) it ends anywhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

PIECE = 1 << 16  # characters
LONGEST_WORD = 1000  # characters of a word that a new tokenizer is trained on
ENDLESS = re.compile(rf"(\S{{{LONGEST_WORD}}})\S+")
GAP = re.compile(r"\s(?=\S)")


class Part(str):
    """A piece of a document that continues in the next piece."""


def pieces(text: str) -> Iterator[str]:
    """The text as `Part`s, the last one a plain string."""
    return _regrouped([text])


def file_pieces(path: Path) -> Iterator[str]:
    """The pieces of a UTF-8 file, without a byte order mark at its beginning.

    Raises ValueError on a file that is empty or binary.
    """
    return _regrouped(_read(path))


def without_endless_words(documents: Iterable[str]) -> Iterator[str]:
    """The documents, endless words shortened: a tokenizer needs none, and to count their pairs takes minutes."""
    for document in documents:
        yield ENDLESS.sub(r"\1", document)


def _read(path: Path) -> Iterator[str]:
    visible = False
    try:
        with open(path, encoding="utf-8-sig") as file:
            while text := file.read(PIECE):
                if "\0" in text:
                    raise ValueError(f"text must be plain text, got {str(path)!r} with zero bytes: it looks binary.")
                visible = visible or not text.isspace()
                yield text
    except UnicodeDecodeError as error:
        raise ValueError(f"text must be UTF-8, got {str(path)!r} with other bytes.") from error
    if not visible:
        raise ValueError(f"text must not be empty, got {str(path)!r}, which holds nothing but white space.")


def _regrouped(texts: Iterable[str]) -> Iterator[str]:
    rest = ""
    for text in texts:
        rest += text
        start = 0
        while len(rest) - start > PIECE:
            end = _cut(rest, start, start + PIECE)
            yield Part(rest[start:end])
            start = end
        rest = rest[start:]
    yield rest


def _cut(text: str, start: int, end: int) -> int:
    gaps = [gap.start() for gap in GAP.finditer(text, max(start + 1, end - PIECE // 2), end)]
    return next((gap for gap in reversed(gaps) if not text[gap - 1].isspace()), end)
