"""Tables of pages, drawn from the record between two comments: the first says of which rows, the second ends it.

    <!-- table: regimes.csv: task=peak-64, steps=2000: mixer, rate: score mean, score error, score n -->
    <!-- end -->

A row of the table has equal values in the columns named third; its numbers are those fields' mean, error (standard
error of the mean), sd, min, max or n over the rows that have them.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import mean, stdev

from fem.tables import markdown_table

TABLE = re.compile(r"(<!-- table: (\S+\.csv): (.*?): (.*?): (.*?) -->\n).*?(?=<!-- end -->)", re.DOTALL)
OF: dict[str, Callable[[list[float]], float | None]] = {
    "mean": lambda numbers: mean(numbers) if numbers else None,
    "error": lambda numbers: stdev(numbers) / len(numbers) ** 0.5 if len(numbers) > 1 else None,
    "sd": lambda numbers: stdev(numbers) if len(numbers) > 1 else None,
    "min": lambda numbers: min(numbers, default=None),
    "max": lambda numbers: max(numbers, default=None),
    "n": len,
}


def parsed(selection: str) -> dict[str, list[str]]:
    """The values of each column that "task=peak-64, seed=0|1" allows."""
    return {column: values.split("|") for column, values in (part.split("=", 1) for part in selection.split(", "))}


def selected(file: Path, allowed: Mapping[str, list[str]]) -> list[dict[str, str]]:
    """The rows of a CSV file that have one of the allowed values in every column."""
    with open(file, newline="", encoding="utf-8") as opened:
        return [row for row in csv.DictReader(opened) if all(row[c] in values for c, values in allowed.items())]


def rows(folder: Path, file: str, selection: str, by: str, fields: str) -> list[dict]:
    """The rows of one table. Raises ValueError where the record has no such rows."""
    table = selected(folder / file, parsed(selection))
    columns, wanted = by.split(", "), [field.split(" ") for field in fields.split(", ")]
    groups: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for row in table:
        if row[wanted[0][0]]:
            groups.setdefault(tuple(row[column] for column in columns), []).append(row)
    if not groups:
        raise ValueError(f"{file} has no {wanted[0][0]} where {selection}.")
    return [
        dict(zip(columns, values, strict=True))
        | {f"{field}, {how}": OF[how]([float(row[field]) for row in of if row[field]]) for field, how in wanted}
        for values, of in groups.items()
    ]


def filled(text: str, folder: Path) -> str:
    """The page with its tables drawn again from the record in `folder`."""
    return TABLE.sub(lambda found: f"{found[1]}{markdown_table(rows(folder, *found.groups()[1:]))}", text)


def fill(folder: Path) -> None:
    """Draw the tables of every page in the folder again."""
    for page in folder.glob("*.md"):
        text = page.read_text(encoding="utf-8")
        if TABLE.search(text):
            page.write_text(filled(text, folder), encoding="utf-8")
