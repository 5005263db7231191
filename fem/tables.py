"""Tables on the terminal. A row is a dict; None: not measured."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

Rows = Sequence[Mapping[str, Any]]
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
    """Whether any cell of the column is a number: it is then aligned to the right."""
    return any(isinstance(row[column], int | float) and not isinstance(row[column], bool) for row in rows)


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
