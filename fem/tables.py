"""Tables as Markdown, as CSV and on the terminal. A row is a dict; None: not measured."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

Rows = Sequence[Mapping[str, Any]]
Best = Mapping[str, Callable[[list[float]], float]]
TERMINAL, MOST_COLUMNS, LONGEST_NUMBER = 80, 5, 28


def cell(value: Any) -> str:
    """A value as a table shows it: blank for None, four digits of a float, commas between thousands."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:#.4g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)


def filled(rows: Rows) -> list[str]:
    """The columns of the first row that are not blank in every row."""
    return [column for column in (rows[0] if rows else ()) if any(cell(row[column]) for row in rows)]


def numeric(rows: Rows, column: str) -> bool:
    """True if any cell of the column is a number, and the column aligned to the right."""
    return any(isinstance(row[column], int | float) and not isinstance(row[column], bool) for row in rows)


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


def write_csv(path: Path, rows: Rows) -> None:
    """The rows with every digit."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0] if rows else ()))
        writer.writeheader()
        writer.writerows(rows)


def show_table(title: str, rows: Rows, page: str = "the run's report.md") -> None:
    """Print the rows to the terminal: the first columns that fit into 80 characters, at most five; a cell with a
    number is never folded. A line below names the columns that are left out, and the `page` that has them.
    """
    columns = filled(rows)
    texts = {column: [cell(row[column]) for row in rows] for column in columns}
    widths = {column: _narrowest(column, texts[column]) for column in columns}
    shown = columns[:MOST_COLUMNS]
    while len(shown) > 1 and sum(widths[column] + 3 for column in shown) + 1 > TERMINAL:
        shown.pop()
    room = TERMINAL - 1 - sum(widths[column] + 3 for column in shown)
    table = Table(title=title, title_justify="left")
    for column in shown:
        wanted = max(map(len, [column, *texts[column]])) - widths[column]
        given = max(0, min(room, wanted))
        room -= given
        justify = "right" if numeric(rows, column) else "left"
        table.add_column(column, justify=justify, overflow="fold", width=widths[column] + given)
    for row in rows:
        table.add_row(*(escape(cell(row[column])) for column in shown))
    Console().print(table)
    if left := columns[len(shown) :]:
        Console().print(escape(f"Also in {page}: {', '.join(left)}."), highlight=False)


def _narrowest(column: str, cells: Sequence[str]) -> int:
    """The width below which a word would break, or a short cell with a number in it."""
    whole = [text for text in cells if len(text) <= LONGEST_NUMBER and re.search(r"\d", text)]
    words = [word[:LONGEST_NUMBER] for text in (column, *cells) for word in text.split()]
    return max(map(len, [*whole, *words]), default=0)
