"""Documents to train on: local text, JSON lines and Parquet, or a dataset of the hub, streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from datasets import IterableDataset, load_dataset

from fem.experiments.lm.text import read_text

TEXT, JSON_LINES, PARQUET = (".txt", ".md"), (".jsonl",), (".parquet",)


def local_files(data: str) -> list[Path] | None:
    """The files that `data` names, a folder's in the order of their names; None where it names no place on disk.

    Raises ValueError on a folder without text, JSON lines or Parquet, and on a file of another kind.
    """
    path = Path(data)
    if not path.exists():
        return None
    known = TEXT + JSON_LINES + PARQUET
    found = sorted(p for p in path.rglob("*") if p.suffix in known) if path.is_dir() else [path]
    if not found or found[0].suffix not in known:
        raise ValueError(f"data must be {', '.join(known)} or a folder of such files, got {data!r}.")
    return found


def local_documents(files: list[Path], field: str) -> Iterator[str]:
    """A text file is one document; every line of JSON and every row of Parquet is one, its text in `field`.

    Raises ValueError on files that are empty, binary or cut off, and on records without the field.
    """
    for path in files:
        if path.suffix in TEXT:
            yield read_text(path)
            continue
        found = 0
        for record in _json_lines(path) if path.suffix in JSON_LINES else _parquet_rows(path, field):
            found += 1
            yield text_of(record, field, f"{path.name}, record {found}")
        if not found:
            raise ValueError(f"data must not be empty, got {str(path)!r}, which holds no record.")


def text_of(record: Any, field: str, where: str) -> str:
    """The text of one record. Raises ValueError where there is none."""
    if not isinstance(record, dict) or not isinstance(record.get(field), str):
        shown = f"the fields {', '.join(record)}" if isinstance(record, dict) else type(record).__name__
        raise ValueError(f"{where} must have text in {field!r}, got {shown}; name the field with --field.")
    return record[field]


def hub_documents(name: str, subset: str | None, rank: int, world: int) -> IterableDataset:
    """The part of a hub dataset's training split that process `rank` of `world` reads, streamed.

    Raises ValueError where there is no such dataset, or no way to it.
    """
    try:
        stream = load_dataset(name, subset, split="train", streaming=True)
    except Exception as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"data must be a file, a folder or a dataset of the hub, got {name!r}: {reason}") from error
    return node_part(stream, rank, world)


def node_part(stream: IterableDataset, rank: int, world: int) -> IterableDataset:
    from datasets.distributed import split_dataset_by_node

    return split_dataset_by_node(stream, rank, world) if world > 1 else stream


def _json_lines(path: Path) -> Iterator[Any]:
    number = 0
    try:
        with open(path, encoding="utf-8") as file:
            for line in file:
                number += 1
                if line.strip():
                    yield json.loads(line)
    except UnicodeDecodeError as error:
        raise ValueError(f"data must be UTF-8, got {str(path)!r} with other bytes from {error.start} on.") from error
    except json.JSONDecodeError as error:
        raise ValueError(
            f"data must be one JSON object a line, got {str(path)!r} with another line {number}."
        ) from error


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
