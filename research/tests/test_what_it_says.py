"""Every measured number under "What it says" of a page of results, in its order, from the JSON that the pages keep."""

import re

import pytest
import said_costs
import said_language
import said_natural
import said_sets
import said_tasks
from said import MEASURED, PAGES

from fem_research.report import OURS

# A function of a page's name: its numbers.
CLAIMS = vars(said_costs) | vars(said_language) | vars(said_natural) | vars(said_sets) | vars(said_tasks)


def measured(text: str) -> list[str]:
    """The numbers of a text that has lost its targets of links, its code and version numbers."""
    return MEASURED.findall(re.sub(r"\]\([^)]*\)|`[^`]*`|(?:[Pp]ython|torch|version) \d[\d.]*", " ", text))


def rounded(number: float, like: str) -> str:
    """A number as the page writes it: as many digits as `like`, and a leading zero where that has one."""
    bare = like.removesuffix(" %")
    text = f"{abs(number):.{len(bare.partition('.')[2])}f}"
    return (text.removeprefix("0") if bare.startswith(".") else text) + like[len(bare) :]


@pytest.mark.parametrize("page", sorted(page.stem for page in PAGES.glob("*.md") if OURS.search(page.read_text())))
def test_every_number_that_a_page_says_is_that_of_its_json(page):
    said = measured(OURS.search((PAGES / f"{page}.md").read_text())[0])
    numbers = CLAIMS[page]()
    assert said == [rounded(number, like) for number, like in zip(numbers, said, strict=True)]
