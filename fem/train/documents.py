"""Documents to train on, from local files: text, JSON lines and Parquet."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fem.train.integrity import digest
from fem.train.pieces import file_pieces, pieces

TEXT, JSON_LINES, PARQUET = (".txt", ".md"), (".jsonl",), (".parquet",)


def local_files(data: str) -> list[Path] | None:
    """The files that `data` names, sorted by name where it is a folder; None where there is no such path.

    Raises ValueError on a folder without text, JSON lines or Parquet, and on a file of another kind.
    """
    path = Path(data)
    if not path.exists():
        return None
    known = TEXT + JSON_LINES + PARQUET
    inside = sorted(path.rglob("*")) if path.is_dir() else [path]
    if linked := [p for p in inside if p.is_symlink() and p.is_dir()]:
        raise ValueError(f"data must hold no linked folders, got {str(linked[0])!r}; name what it links to.")
    files = [p for p in inside if kind(p) in known]
    if not files:
        raise ValueError(f"data must be {', '.join(known)} or a folder of such files, got {data!r}.")
    if strange := [p for p in files if not p.is_file()]:
        raise ValueError(f"data must be regular files, got {str(strange[0])!r}, a pipe, device or folder.")
    return files


def kind(path: Path) -> str:
    return path.suffix.lower()


def check_outside(data: str, output: Path) -> None:
    """Raise ValueError on an output inside the folder of the data, which its own files would join."""
    if Path(data).is_dir() and output.resolve().is_relative_to(Path(data).resolve()):
        raise ValueError(f"output must lie outside the folder of the data, got {str(output)!r} in {data!r}.")


def content(files: list[Path]) -> str:
    """A digest of the files' contents, in their order; names, folders and times do not matter."""
    hasher = hashlib.blake2b(digest_size=16)
    for path in files:
        name = "text" if kind(path) in TEXT else kind(path)
        hasher.update(f"{name} {digest(path)}\n".encode())
    return hasher.hexdigest()


def local_documents(files: list[Path], field: str) -> Iterator[str]:
    """The documents: each text file, each line of JSON and each row of Parquet, whose text is in `field`.

    Long documents are yielded in pieces, all but the last of type `Part`. Raises ValueError on files that are
    empty, binary or cut off, and on records without the field.
    """
    for path in files:
        if kind(path) in TEXT:
            yield from file_pieces(path)
            continue
        records, visible = 0, False
        for record in _json_lines(path) if kind(path) in JSON_LINES else _parquet_rows(path, field):
            records += 1
            text = text_of(record, field, f"{path.name}, record {records}")
            visible = visible or bool(text.strip())
            yield from pieces(text)
        if not visible:
            what = "whose every text is white space" if records else "which holds no record"
            raise ValueError(f"data must not be empty, got {str(path)!r}, {what}.")


def text_of(record: Any, field: str, where: str) -> str:
    """The text of one record. Raises ValueError where there is none."""
    text = record.get(field) if isinstance(record, dict) else None
    if not isinstance(text, str):
        shown = f"the fields {', '.join(record)}" if isinstance(record, dict) else type(record).__name__
        if isinstance(record, dict) and field in record:
            shown = "null" if text is None else f"a {type(text).__name__}"
        raise ValueError(f"{where} must have text in {field!r}, got {shown}; name the field with --field.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where} must be text, got half of a surrogate pair at character {error.start}.") from error
    return text


def _json_lines(path: Path) -> Iterator[Any]:
    number = 0
    try:
        with open(path, encoding="utf-8-sig") as file:
            for line in file:
                number += 1
                if line.strip():
                    yield json.loads(line)
    except UnicodeDecodeError as error:
        raise ValueError(f"data must be UTF-8, got {str(path)!r} with other bytes.") from error
    except (json.JSONDecodeError, RecursionError) as error:
        what = "a line nested too deeply," if isinstance(error, RecursionError) else "another line"
        raise ValueError(f"data must be one JSON object a line, got {str(path)!r} with {what} {number}.") from error


def _parquet_rows(path: Path, field: str) -> Iterator[dict]:
    import pyarrow as pa
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as file:
            if field not in file.schema_arrow.names:
                text_of(dict.fromkeys(file.schema_arrow.names), field, path.name)
            for batch in file.iter_batches(columns=[field]):
                yield from batch.to_pylist()
    except pa.ArrowInvalid as error:
        raise ValueError(f"data must be whole Parquet files, got {str(path)!r}: {error}") from error
