"""The files that a run writes of its results: tables and the page."""

from __future__ import annotations

import re
from pathlib import Path

from fem.tables import Rows, markdown_table, write_csv


def write_table(folder: Path, name: str, rows: Rows) -> None:
    """`name`.csv with every digit and `name`.md to read, in `folder`."""
    write_csv(folder / f"{name}.csv", rows)
    (folder / f"{name}.md").write_text(markdown_table(rows), encoding="utf-8")


def write_page(folder: Path, title: str, *parts: str) -> None:
    """Write `folder`/report.md, the page of a run. Names in the title are escaped, so that they are no markup."""
    title = re.sub(r"([\\`*\[\]<>#])", r"\\\1", " ".join(title.split()))
    text = "\n\n".join(part.strip() for part in (f"# {title}", *parts))
    (folder / "report.md").write_text(f"{text}\n", encoding="utf-8")
