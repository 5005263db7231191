"""Tables on the terminal. A row is a dict; None: not measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

Rows = Sequence[Mapping[str, Any]]


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


def table(rows: Rows, **options) -> Table:
    """The rows for rich to print, without columns that are blank in every row; what is too wide is folded."""
    made = Table(title_justify="left", **options)
    columns = filled(rows)
    for index, column in enumerate(columns):
        justify = "right" if numeric(rows, column) else "left"
        made.add_column(column, justify=justify, overflow="fold", no_wrap=index == 0)
    for row in rows:
        made.add_row(*(escape(cell(row[column])) for column in columns))
    return made


def show_table(title: str, rows: Rows) -> None:
    """Print the rows to the terminal."""
    Console().print(table(rows, title=title))
