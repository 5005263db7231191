"""Tables of results: on the terminal, as Markdown and as CSV. A row is a dict; None: not measured."""

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


def markdown_table(rows: Rows, best: Best | None = None) -> str:
    """The rows as a Markdown table, numbers aligned to the right, without columns that are blank in every row.

    best: max or min by column; the cells that begin with the largest or smallest number are bold.
    """
    columns = _filled(rows)
    align = ["---:" if any(_is_number(row[column]) for row in rows) else "---" for column in columns]
    cells = [{column: _plain(cell(row[column])) for column in columns} for row in rows]
    for column, which in (best or {}).items():
        numbers = [_leading(row.get(column, "")) for row in cells]
        known = [number for number in numbers if number is not None]
        for row, number in zip(cells, numbers):
            if len(known) > 1 and number == which(known):
                row[column] = f"**{row[column]}**"
    lines = [columns, align, *(row.values() for row in cells)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _filled(rows: Rows) -> list[str]:
    """The columns of the first row that are not blank in every row."""
    return [column for column in (rows[0] if rows else ()) if any(cell(row[column]) for row in rows)]


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


def show_table(title: str, rows: Rows, page: str = "the run's report.md") -> None:
    """Print the rows to the terminal: the first columns that fit into 80 characters, at most five; a cell with a
    number is never folded. A line below names the columns that are left out, and the `page` that has them.
    """
    columns = _filled(rows)
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
        justify = "right" if any(_is_number(row[column]) for row in rows) else "left"
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


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
