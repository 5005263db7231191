"""Tables and pictures of pages, drawn from the record; a comment says of which rows.

    <!-- table: regimes.csv: task=peak-64, steps=2000: mixer, rate: score ±, score n -->
    <!-- end -->

A row of the table has equal values in the columns named third. Its numbers are those fields' mean, error (standard
error of the mean), ± (both), sd, median, min, max, range, sum or n over the rows of the record that have them; `over`
is the ratio of means, and `lead` the mean difference seed by seed, ±, to the rows of attention. `values` lists what
stands in the field, for tables of settings. "mixer / task" in the third place asks for a column per task. "run!=a"
leaves rows out, "run=a|b" takes both; inside a table of Markdown, where | ends a cell, that is written "run=a or b". A
mixer without a row, or a seed that counts twice in one cell, is refused. A picture has a dot per row of the record, or
a line where rows are steps, and a panel per task:

    <!-- picture: mad.csv: run=mad_laptop: mixer / task: mean (mean accuracy): mad.png -->
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import mean, median, stdev

from fem.tables import markdown_table

TABLE = re.compile(r"(<!-- table: (\S+\.csv): (.*?): (.*?): (.*?) -->\n).*?(?=<!-- end -->)", re.DOTALL)
PICTURE = re.compile(r"<!-- picture: (\S+\.csv): (.*?): (.*?) / (.*?): (\w+)(?: \((.*?)\))?: (\S+\.png) -->")


def _error(numbers: list[float]) -> float | None:
    return stdev(numbers) / len(numbers) ** 0.5 if len(numbers) > 1 else None


def _with_error(numbers: list[float]) -> str | None:
    if not numbers:
        return None
    return f"{mean(numbers):#.4g}" if (error := _error(numbers)) is None else f"{mean(numbers):#.4g} ± {error:.2g}"


OF: dict[str, Callable[[list[float]], float | str | None]] = {
    "mean": lambda numbers: mean(numbers) if numbers else None,
    "median": lambda numbers: median(numbers) if numbers else None,
    "error": _error,
    "±": _with_error,
    "sd": lambda numbers: stdev(numbers) if len(numbers) > 1 else None,
    "joint": lambda errors: math.hypot(*errors) / len(errors) if errors else None,  # of the mean of several errors
    "min": lambda numbers: min(numbers, default=None),
    "max": lambda numbers: max(numbers, default=None),
    "range": lambda numbers: max(numbers) - min(numbers) if numbers else None,
    "sum": sum,
    "n": len,
}

Rows = list[dict[str, str]]
BASE = "attention"


def parsed(selection: str) -> dict[str, list[str]]:
    """The values of each column that "task=peak-64, seed=0|1" or "task=peak-64, seed=0 or 1" allows."""
    parts = (part.split("=", 1) for part in selection.split(", "))
    return {column: re.split(r"\|| or ", values) for column, values in parts}


def selected(file: Path, allowed: Mapping[str, list[str]]) -> Rows:
    """The rows of a CSV file that have one of the allowed values in every column, and none where it ends in "!"."""
    with open(file, newline="", encoding="utf-8") as opened:
        return [
            row
            for row in csv.DictReader(opened)
            if all((row[c.removesuffix("!")] in values) != c.endswith("!") for c, values in allowed.items())
        ]


def with_numbers(folder: Path, file: str, selection: Mapping[str, list[str]], field: str) -> Rows:
    """The selected rows that have a number in this field. Raises ValueError where there are none."""
    found = [row for row in selected(folder / file, selection) if row[field]]
    if not found:
        where = ", ".join(f"{column}={'|'.join(values)}" for column, values in selection.items())
        raise ValueError(f"{file} has no {field} where {where}.")
    return found


def _groups(rows: Rows, columns: list[str]) -> dict[tuple[str, ...], Rows]:
    groups: dict[tuple[str, ...], Rows] = {}
    for row in rows:
        groups.setdefault(tuple(row[column] for column in columns), []).append(row)
    return groups


def numbers(rows: Rows, field: str) -> list[float]:
    """The numbers of a field, one for each training. Raises ValueError where a seed of a task stands twice."""
    rows = [row for row in rows if row[field]]
    seeded = [row for row in rows if row.get("seed")]
    by_seed = _groups(seeded, [column for column in ("seed", "task") if seeded and column in seeded[0]])
    for (seed, *task), of in by_seed.items():
        if len(of) > 1:
            runs = " and ".join(row["run"] for row in of)
            raise ValueError(
                f"seed {' of '.join([seed, *task])} must count once for {of[0]['mixer']}, got runs {runs}."
            )
    return [float(row[field]) for row in rows]


def differences(ours: Rows, theirs: Rows, field: str) -> list[float]:
    """Ours minus theirs, task by task and seed by seed, of those that both have."""
    ours, theirs = ([row for row in rows if row[field]] for rows in (ours, theirs))
    base = dict(zip(map(_training, theirs), numbers(theirs, field), strict=True))
    pairs = zip(map(_training, ours), numbers(ours, field), strict=True)
    return [number - base[training] for training, number in pairs if training in base]


def _training(row: Mapping[str, str]) -> tuple[str | None, str]:
    return row.get("task"), row["seed"]


def rows(folder: Path, file: str, selection: str, by: str, fields: str) -> list[dict]:
    """The rows of one table. Raises ValueError where a mixer that is asked for has no row, or a seed counts twice."""
    by, _, across = by.partition(" / ")
    columns, wanted = by.split(", "), [field.split(" ") for field in fields.split(", ")]
    table = with_numbers(folder, file, parsed(selection), wanted[0][0])
    table = [row | {"date": row["date"].partition("T")[0]} if "date" in row else row for row in table]
    if missing := set(parsed(selection).get("mixer", [])) - {row["mixer"] for row in table}:
        raise ValueError(f"{file} has no {wanted[0][0]} of {', '.join(sorted(missing))} where {selection}.")
    parts = {name: of for (name,), of in _groups(table, [across]).items()} if across else {"": table}
    settings = [column for column in columns if column not in ("mixer", "rate")]
    lines = []
    for values, of in _groups(table, columns).items():
        line = dict(zip(columns, values, strict=True))
        for name, part in parts.items():
            ours = [row for row in of if row in part]
            theirs = [row for row in part if row["mixer"] == BASE and all(row[c] == line[c] for c in settings)]
            for field, how in wanted:
                line[name or _heading(field, how)] = _number(ours, theirs, field, how)
        lines.append(line)
    first = {row["mixer"]: place for place, row in reversed([*enumerate(table)])}
    return sorted(lines, key=lambda line: [_place(first.get(line[column], line[column])) for column in columns])


def _place(value: str | int) -> tuple[float, str]:
    """Where a line stands: numbers by size, mixers in the order of the record, other words by the alphabet."""
    try:
        return float(value), ""
    except ValueError:
        return math.inf, str(value)


def _number(ours: Rows, theirs: Rows, field: str, how: str) -> float | int | str | None:
    if how == "lead":
        pairs = differences(ours, theirs, field)
        return f"{mean(pairs):+.3f}" + ("" if len(pairs) < 2 else f" ± {_error(pairs):.3f}") if any(pairs) else None
    if how == "n":
        return sum(bool(row[field]) for row in ours)
    if how == "values":
        return _listed({row[field] for row in ours} - {""})
    a = numbers(ours, field)
    if how == "over":
        b = numbers(theirs, field)
        return f"{mean(a) / mean(b):.2f}" if a and b else None
    return OF[how](a)


def _listed(values: set[str]) -> str:
    """Words as they stand, and how far numbers reach: "peak, recall", "64 and 256", "0 to 4"."""
    ordered = sorted(values, key=_place)
    if not ordered or math.isinf(_place(ordered[-1])[0]):
        return ", ".join(ordered)
    ends = dict.fromkeys([_grouped(ordered[0]), _grouped(ordered[-1])])
    return (" to " if len(ordered) > 2 else " and ").join(ends)


def _grouped(value: str) -> str:
    """Long whole numbers with commas."""
    return f"{int(value):,}" if value.isdigit() and len(value) > 4 else value


def _heading(field: str, how: str) -> str:
    count = "rows" if field == "mixer" else "trainings"
    known = {"mean": field, "±": field, "values": field, "n": count, "over": f"{field}, ratio"}
    return known.get(how, f"{field}, {how}")


def filled(text: str, folder: Path) -> str:
    """The page with its tables drawn again from the record in `folder`."""
    return TABLE.sub(lambda found: f"{found[1]}{markdown_table(rows(folder, *found.groups()[1:]))}", text)


def draw(
    folder: Path, file: str, selection: str, by: str, panel: str, field: str, words: str | None, name: str
) -> None:
    """The picture of a page: every value of the column `by` has a dot for each of its rows, or a line over steps."""
    from fem_research.common.names import colour  # with matplotlib, which a table does without
    from fem_research.common.plots import Panel, dots, learning_curves

    found = with_numbers(folder, file, parsed(selection), field)
    panels = {
        title: {label: of for (label,), of in _groups(part, [by]).items()}
        for (title,), part in _groups(found, [panel]).items()
    }
    colours = {row[by]: colour(row[by]) for row in found}
    if "step" in found[0]:
        lines = [
            Panel(
                title if len(panels) > 1 else "",
                "step",
                {label: [_line(run_rows, field) for run_rows in _runs(of)] for label, of in part.items()},
            )
            for title, part in panels.items()
        ]
        learning_curves(folder / name, f"{words or field} while training", lines, colours)
    else:
        scores = {
            title: {label: [float(row[field]) for row in of] for label, of in part.items()}
            for title, part in panels.items()
        }
        dots(folder / name, f"{words or field} of every training", scores, colours)


def _runs(rows: Rows) -> list[Rows]:
    return list(_groups(rows, ["run", "seed"]).values())


def _line(rows: Rows, field: str) -> tuple[list[int], list[float]]:
    return [int(row["step"]) for row in rows], [float(row[field]) for row in rows]


def fill(folder: Path) -> None:
    """Draw the tables and the pictures of every page in the folder again."""
    for page in folder.glob("*.md"):
        text = page.read_text(encoding="utf-8")
        if TABLE.search(text):
            page.write_text(filled(text, folder), encoding="utf-8")
        for found in PICTURE.finditer(text):
            draw(folder, *found.groups())
