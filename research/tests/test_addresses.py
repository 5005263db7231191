"""Every number with an address is what stands there: 0.96<!-- regimes.csv: task=peak-64, seed=0: score mean -->.

In README, docs and results a number with a point or a per cent needs one, but for sizes such as 1.3M, numbers in
headings and behind words like "version", and settings, which stand in `code`.
"""

import json
import re
from functools import reduce
from operator import getitem, truediv
from pathlib import Path

import pytest

from fem_research.page_tables import OF, differences, numbers, parsed, with_numbers

ROOT, RESULTS = Path(__file__).parents[2], Path(__file__).parents[1] / "results"
PAGES = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *RESULTS.rglob("*.md")]
STRICT = [page for page in PAGES if page.parent in (ROOT, ROOT / "docs", RESULTS) and page.stem != "equations"]
MEASURED = re.compile(r"(?<![\w.,])[-+±]?\d*(?:,\d{3})*\.?\d+(?!\.?\d)(?: ?%|[MB]\b)?")
ADDRESS = re.compile(r"\**(?:\]\([^)]*\))?\**<!-- ([\w/]+\.(?:csv|json)): (.+?) -->")
WORDS = r"(?:Python|[Tt]orch|PyTorch|Apache|version|Section|Theorem|Proposition|Prop\.)[ -]\d[\d.]*(?: to \d[\d.]*)?"
CODE = re.compile(rf"```.*?```|`[^`]*`|\$\$.*?\$\$|^#.*?$|{WORDS}", re.DOTALL | re.MULTILINE)


def value_of(file: str, address: str) -> float:
    what, change, other = re.fullmatch(r"(.+?)(?: (over|minus) (.+))?", address).groups()
    if file.endswith(".json"):
        found = json.loads((RESULTS / file).read_text(encoding="utf-8"))
        return reduce(getitem, [int(key) if key.isdigit() else key for key in what.split("/")], found)
    chosen, field, how = re.fullmatch(r"(.+): (\w+) ?(\w*)", what).groups()
    ours, of = with_numbers(RESULTS, file, parsed(chosen), field), OF[how or "mean"]
    if change:
        theirs = with_numbers(RESULTS, file, parsed(chosen) | parsed(other), field)
        ratio = (of(numbers(rows, field)) for rows in (ours, theirs))
        return truediv(*ratio) if change == "over" else of(differences(ours, theirs, field))
    assert how or len(set(numbers(ours, field))) == 1, f"{address}: say which of {', '.join(OF)} of {len(ours)} numbers"
    return of(numbers(ours, field))


def written(value: float, like: str) -> str:
    """The value as `like` is written: with its digits, sign and commas, per cent or millions, and a zero in front."""
    bare = like.strip("+-±%M ")
    scaled = abs(value) * (100 if "%" in like else 1e-6 if "M" in like else 1)
    text = f"{scaled:{',' * (',' in bare)}.{len(bare.partition('.')[2])}f}"
    sign = ("+" if value >= 0 else "-") if like[0] in "+-" else like[0] * (like[0] == "±")
    return sign + (text.lstrip("0") if bare[0] == "." else text) + like[len(like.rstrip("%M ")) :]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_number_with_an_address_is_what_stands_there(page):
    for block in CODE.sub(" ", page.read_text(encoding="utf-8")).split("\n\n"):
        outside = re.sub(r"<!--.*?-->|\]\([^)]*\)", lambda found: "#" * len(found[0]), block)
        before = {number.end(): number[0] for number in MEASURED.finditer(outside)}
        for address in ADDRESS.finditer(block):
            like = before.pop(address.start(), "none")
            assert like == written(value_of(*address.groups()), like), address[0]
        left = [number for number in before.values() if re.search(r"\.\d+$|%", number)]
        assert page not in STRICT or not left or block.lstrip().startswith("<!-- table"), f"{left} have no address"
