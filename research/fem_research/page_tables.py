"""Tables of pages, drawn from the record between two comments: the first says of which rows, the second ends it.

    <!-- table: regimes.csv: task=peak-64, steps=2000: mixer, rate: score mean, score error, score n -->
    <!-- end -->

A row of the table has equal values in the columns named third; its numbers are those fields' mean, error (standard
error of the mean), sd, min, max or n over the rows that have them.
"""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd

from fem.runs.tables import markdown_table

TABLE = re.compile(r"(<!-- table: (\S+\.csv): (.*?): (.*?): (.*?) -->\n).*?(?=<!-- end -->)", re.DOTALL)
OF = {"mean": "mean", "error": "sem", "sd": "std", "min": "min", "max": "max", "n": "count"}


def rows(folder: Path, file: str, selection: str, by: str, fields: str) -> list[dict]:
    """The rows of one table. Raises ValueError where the record has no such rows."""
    table = pd.read_csv(folder / file, dtype=str, keep_default_na=False)
    for column, values in (part.split("=", 1) for part in selection.split(", ")):
        table = table[table[column].isin(values.split("|"))]
    wanted = [field.split(" ") for field in fields.split(", ")]
    table = table[table[wanted[0][0]] != ""]
    if table.empty:
        raise ValueError(f"{file} has no {wanted[0][0]} where {selection}.")
    lines = []
    for values, of in table.groupby(by.split(", "), sort=False):
        line = dict(zip(by.split(", "), values, strict=True))
        for field, how in wanted:
            number = pd.to_numeric(of[field]).agg(OF[how])
            line[f"{field}, {how}"] = None if pd.isna(number) else int(number) if how == "n" else float(number)
        lines.append(line)
    return lines


def filled(text: str, folder: Path) -> str:
    """The page with its tables drawn again from the record in `folder`."""
    return TABLE.sub(lambda found: f"{found[1]}{markdown_table(rows(folder, *found.groups()[1:]))}", text)


def fill(folder: Path) -> None:
    """Draw the tables of every page in the folder again."""
    for page in folder.glob("*.md"):
        text = page.read_text(encoding="utf-8")
        if TABLE.search(text):
            page.write_text(filled(text, folder), encoding="utf-8")
