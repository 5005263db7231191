"""Every measured number of the README, and of the FAQ's sections of figures, is drawn by claims_*.py from what the
results pages keep beside them as JSON. A number that no claim covers fails: add it, with the key that holds it."""

import re
from pathlib import Path

from claims import plain
from claims_faq import faq
from claims_language import figures, language
from claims_readme import readme
from claims_summary import summary
from said import MEASURED

ROOT = Path(__file__).parents[2]
NOT_MEASURED = ("Python 3.10", "Apache-2.0")
FAQ = (
    *("When should I not use FEM?", "Which parts do I need?", "Which prior should I take?"),
    *("How large is the state?", "What runs where?"),
)


def sections(text: str, wanted: tuple[str, ...]) -> str:
    parts = re.split(r"^## (.*)\n", text, flags=re.MULTILINE)
    return "\n".join(body for title, body in zip(parts[1::2], parts[2::2]) if title in wanted)


def checked(text: str, claims: list[str], others: tuple[str, ...] = ()) -> list[str]:
    """The measured numbers that no claim covers. A claim that the text does not make fails."""
    for claim in [*claims, *others]:
        assert claim in text, f"the page does not say {claim!r}"
        text = text.replace(claim, " ")
    text = re.sub(r"\]\([^)]*\)", "]", text)
    return [text[max(0, found.start() - 60) : found.end() + 20] for found in MEASURED.finditer(text)]


def test_every_measured_number_of_the_readme_is_that_of_a_results_page():
    text = plain((ROOT / "README.md").read_text())
    numbers = checked(text, readme(), NOT_MEASURED)
    assert not numbers


def test_every_measured_number_of_the_table_of_all_comparisons_is_that_of_a_results_page():
    text = plain((ROOT / "research" / "results" / "summary.md").read_text())
    assert not checked(text, summary())


def test_every_measured_number_of_the_faq_is_that_of_a_results_page():
    text = plain(sections((ROOT / "docs" / "faq.md").read_text(), FAQ))
    assert not checked(text, faq())


def test_every_measured_number_of_the_page_on_language_models_is_that_of_a_results_page():
    page = (ROOT / "research" / "results" / "ablate_16m.md").read_text()
    assert all(table in page for table in figures.losses_16m().values())
    text = plain((ROOT / "docs" / "language.md").read_text())
    assert not checked(text, language())
