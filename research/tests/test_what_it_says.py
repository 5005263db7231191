"""Every measured number under "What it says" of the pages on language models, on tasks, on costs and on images, in its
order, from the JSON that the pages keep."""

import re
from importlib import import_module
from pathlib import Path

import pytest

PAGES = Path(__file__).parents[1] / "results"
SAID = re.compile(r"^## What it says\n(.*?)(?=^## |\Z)", re.DOTALL | re.MULTILINE)
MEASURED = re.compile(r"(?<![\w.])(?:\d+)?\.\d+(?!\w*\.\d)|\b\d+ %")
GROUPS = (
    *("ablate", "argmax", "context", "decode", "finetune", "forecast", "gpt2", "layer", "mad", "natural", "read"),
    *("regimes", "table5", "vision"),
)
CLAIMS = {
    page: numbers
    for name in ("language", "tasks", "costs")
    for page, numbers in import_module(f"said_{name}").CLAIMS.items()
}


def measured(text: str) -> list[str]:
    """The numbers of a text that has lost its targets of links, its code and version numbers."""
    return MEASURED.findall(re.sub(r"\]\([^)]*\)|`[^`]*`|(?:[Pp]ython|torch|version) \d[\d.]*", " ", text))


def rounded(number: float, like: str) -> str:
    """A number as the page writes it: as many digits as `like`, and a leading zero where that has one."""
    bare = like.removesuffix(" %")
    text = f"{abs(number):.{len(bare.partition('.')[2])}f}"
    return (text.removeprefix("0") if bare.startswith(".") else text) + like[len(bare) :]


@pytest.mark.parametrize("page", sorted(page.stem for group in GROUPS for page in PAGES.glob(f"{group}*.md")))
def test_every_number_that_a_page_says_is_that_of_its_json(page):
    said = measured(SAID.search((PAGES / f"{page}.md").read_text())[1])
    numbers = CLAIMS[page]()
    assert said == [rounded(number, like) for number, like in zip(numbers, said, strict=True)]
