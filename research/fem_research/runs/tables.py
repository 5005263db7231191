"""Tables of results as Markdown and as CSV, and pages. A row is a dict; None: not measured."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from fem.tables import Rows, cell, filled, numeric

Best = Mapping[str, Callable[[list[float]], float]]


def markdown_table(rows: Rows, best: Best | None = None) -> str:
    """The rows as a Markdown table, numbers aligned to the right, without columns that are blank in every row.

    best: max or min by column; the cells that begin with the largest or smallest number are bold.
    """
    columns = filled(rows)
    align = ["---:" if numeric(rows, column) else "---" for column in columns]
    cells = [{column: _plain(cell(row[column])) for column in columns} for row in rows]
    for column, which in (best or {}).items():
        numbers = [_leading(row.get(column, "")) for row in cells]
        known = [number for number in numbers if number is not None]
        for row, number in zip(cells, numbers):
            if len(known) > 1 and number == which(known):
                row[column] = f"**{row[column]}**"
    lines = [columns, align, *(row.values() for row in cells)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _leading(text: str) -> float | None:
    """The number that a cell begins with."""
    match = re.match(r"-?[\d,]+\.?\d*(e[+-]\d+)?", text)
    return float(match[0].replace(",", "")) if match else None


def _plain(text: str) -> str:
    """The text of a cell, without signs that would end the cell or its line, or begin a tag."""
    return " ".join(text.replace("<", "&lt;").replace("|", "&#124;").split())


def write_table(folder: Path, name: str, rows: Rows) -> None:
    """`name`.csv with every digit and `name`.md to read, in `folder`."""
    with open(folder / f"{name}.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0] if rows else ()))
        writer.writeheader()
        writer.writerows(rows)
    (folder / f"{name}.md").write_text(markdown_table(rows), encoding="utf-8")


def write_page(folder: Path, title: str, *parts: str) -> None:
    """Write `folder`/report.md, the page of a run. Names in the title are escaped, so that they are no markup."""
    title = re.sub(r"([\\`*\[\]<>#])", r"\\\1", " ".join(title.split()))
    text = "\n\n".join(part.strip() for part in (f"# {title}", *parts))
    (folder / "report.md").write_text(f"{text}\n", encoding="utf-8")
