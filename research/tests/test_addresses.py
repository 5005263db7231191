"""Every number with an address is what stands there: 0.96<!-- regimes.csv: task=peak-64, seed=0: score mean -->."""

import json
import re
from functools import reduce
from operator import getitem
from pathlib import Path

import pytest

from fem_research.page_tables import OF, differences, numbers, parsed, with_numbers

RESULTS = Path(__file__).parents[1] / "results"
README, *_ = PAGES = [
    RESULTS.parents[1] / "README.md",
    *RESULTS.parents[1].glob("docs/**/*.md"),
    *RESULTS.rglob("*.md"),
]
PROSE = [page for page in RESULTS.glob("*.md") if page.stem not in ("checked", "data")]
MEASURED = re.compile(r"(?<![\w.,])[-+±]?\d*(?:,\d{3})*\.?\d+(?!\.?\d)(?: ?%|M\b)?")
ADDRESS = re.compile(r"\**(?:\]\([^)]*\))?\**<!-- ([\w/]+\.(?:csv|json)): (.+?) -->")
CODE = re.compile(r"```.*?```|`[^`]*`|\$\$.*?\$\$|(?:Python|torch|Apache|version)[ -]\d[\d.]*", re.DOTALL)


def value_of(file: str, address: str) -> float:
    what, change, other = re.fullmatch(r"(.+?)(?: (over|minus) (.+))?", address).groups()
    if file.endswith(".json"):
        found = json.loads((RESULTS / file).read_text(encoding="utf-8"))
        keys = [[int(key) if key.isdigit() else key for key in path.split("/")] for path in (what, other) if path]
        ours, *theirs = (reduce(getitem, path, found) for path in keys)
        return ours / theirs[0] if theirs else ours
    chosen, field, how = re.fullmatch(r"(.+): (\w+) ?(\w*)", what).groups()
    ours, of = with_numbers(RESULTS, file, parsed(chosen), field), OF[how or "mean"]
    if change:
        theirs = with_numbers(RESULTS, file, parsed(chosen) | parsed(other), field)
        return (
            of(numbers(ours, field)) / of(numbers(theirs, field))
            if change == "over"
            else of(differences(ours, theirs, field))
        )
    found = numbers(ours, field)
    assert how or len(set(found)) == 1, f"{address}: say which of {', '.join(OF)} of {len(found)} numbers"
    return of(found)


def written(value: float, like: str) -> str:
    """The value as `like` is written: with its digits, sign and commas, per cent or millions, and a zero in front."""
    bare = like.strip("+-±%M ")
    scaled = abs(value) * (100 if "%" in like else 1e-6 if "M" in like else 1)
    text = f"{scaled:{',' * (',' in bare)}.{len(bare.partition('.')[2])}f}"
    sign = ("+" if value >= 0 else "-") if like[0] in "+-" else like[0] * (like[0] == "±")
    return sign + (text.lstrip("0") if bare[0] == "." else text) + like[len(like.rstrip("%M ")) :]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_number_with_an_address_is_what_stands_there(page):
    text = CODE.sub(" ", page.read_text(encoding="utf-8"))
    for block in text.split("\n\n"):
        outside = re.sub(r"<!--.*?-->|\]\([^)]*\)", lambda found: "#" * len(found[0]), block)
        before = {number.end(): number[0] for number in MEASURED.finditer(outside)}
        for address in ADDRESS.finditer(block):
            like = before.pop(address.start(), "none")
            assert like == written(value_of(*address.groups()), like), address[0]
        left = [number for number in before.values() if re.search(r"\.\d|%", number)]
        drawn, table = block.lstrip().startswith("<!-- table"), block.lstrip().startswith("|") and ADDRESS.search(block)
        told = ADDRESS.search(text) if page == README else page in PROSE and not drawn
        assert not left or not (table or told), f"{left} have no address"
