"""Tables of pages between comments are what the record says."""

from pathlib import Path

import pytest

from fem_research.page_tables import TABLE, fill, filled

RESULTS = Path(__file__).parents[1] / "results"
RECORD = "run,mixer,seed,score\na,FEM,0,0.5\na,FEM,1,0.7\na,attention,0,0.25\nb,FEM,0,\n"
PAGE = (
    "Before.\n\n<!-- table: x.csv: run=a|b: mixer: score mean, score error, score n -->\nold\n<!-- end -->\n\nAfter.\n"
)


@pytest.mark.parametrize("page", [p.name for p in sorted(RESULTS.glob("*.md")) if TABLE.search(p.read_text())])
def test_the_tables_of_a_page_are_drawn_from_the_record(page):
    text = (RESULTS / page).read_text(encoding="utf-8")
    assert filled(text, RESULTS) == text


def test_rows_with_equal_values_are_one_line(tmp_path):
    (tmp_path / "x.csv").write_text(RECORD)
    (tmp_path / "page.md").write_text(PAGE)
    fill(tmp_path)
    text = (tmp_path / "page.md").read_text()
    assert "old" not in text
    assert "| FEM | 0.6000 | 0.1000 | 2 |" in text
    assert "| attention | 0.2500 |  | 1 |" in text
    assert text.startswith("Before.")
    assert text.endswith("<!-- end -->\n\nAfter.\n")
    (tmp_path / "x.csv").write_text(RECORD.replace("0.7", "0.8"))
    assert filled(text, tmp_path) != text


def test_a_selection_of_nothing_is_an_error(tmp_path):
    (tmp_path / "x.csv").write_text(RECORD)
    with pytest.raises(ValueError, match=r"x\.csv has no score where run=c"):
        filled(PAGE.replace("a|b", "c"), tmp_path)
