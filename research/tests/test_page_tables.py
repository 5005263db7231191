"""Tables of pages between comments are what the record says."""

from pathlib import Path

import pytest

from fem_research.page_tables import TABLE, fill, filled

RESULTS = Path(__file__).parents[1] / "results"
RECORD = "run,mixer,seed,score\na,FEM,0,0.5\na,FEM,1,0.7\na,attention,0,0.25\nb,FEM,0,\n"
PAGE = "Before.\n\n<!-- table: x.csv: run=a|b: mixer: score ±, score lead, score n -->\nold\n<!-- end -->\n\nAfter.\n"


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
    assert "| FEM | 0.6000 ± 0.1 | +0.250 | 2 |" in text
    assert "| attention | 0.2500 |  | 1 |" in text
    assert text.startswith("Before.")
    assert text.endswith("<!-- end -->\n\nAfter.\n")
    (tmp_path / "x.csv").write_text(RECORD.replace("0.7", "0.8"))
    assert filled(text, tmp_path) != text


def test_a_selection_of_nothing_is_an_error(tmp_path):
    (tmp_path / "x.csv").write_text(RECORD)
    with pytest.raises(ValueError, match=r"x\.csv has no score where run=c"):
        filled(PAGE.replace("a|b", "c"), tmp_path)


def test_a_table_may_have_a_column_per_task_and_ratios_to_attention(tmp_path):
    record = "task,mixer,ms\nshort,attention,2\nshort,FEM,3\nlong,FEM,30\nlong,attention,40\n"
    (tmp_path / "x.csv").write_text(record)
    across, ratios = (
        f"<!-- table: x.csv: mixer=FEM|attention: {how} -->\n<!-- end -->"
        for how in ("mixer / task: ms mean", "task, mixer: ms over")
    )
    assert "| mixer | short | long |\n| --- | ---: | ---: |\n| attention | 2.000 | 40.00 |" in filled(across, tmp_path)
    lines = filled(ratios, tmp_path).splitlines()
    assert lines[3:7] == [
        "| long | attention | 1.00 |",
        "| long | FEM | 0.75 |",
        "| short | attention | 1.00 |",
        "| short | FEM | 1.50 |",
    ]


def test_a_seed_counts_once_in_a_cell(tmp_path):
    (tmp_path / "x.csv").write_text(RECORD.replace("FEM,1", "FEM,0"))
    with pytest.raises(ValueError, match=r"seed 0 must count once for FEM, got runs a and a\."):
        filled(PAGE, tmp_path)


def test_a_mixer_without_a_row_is_an_error(tmp_path):
    (tmp_path / "x.csv").write_text(RECORD)
    with pytest.raises(ValueError, match=r"x\.csv has no score of GLA where mixer=FEM\|GLA\."):
        filled(PAGE.replace("run=a|b", "mixer=FEM|GLA"), tmp_path)


def test_a_table_of_settings_lists_what_stands_in_the_record(tmp_path):
    (tmp_path / "x.csv").write_text(
        "run,mixer,seed,steps,score\n" + "".join(f"a,FEM,{n},{n % 2},1\n" for n in range(11))
    )
    text = filled("<!-- table: x.csv: run=a or b: run: score n, seed values, steps values -->\n<!-- end -->", tmp_path)
    assert "| run | trainings | seed | steps |" in text
    assert "| a | 11 | 0 to 10 | 0 and 1 |" in text


def test_rows_can_be_left_out(tmp_path):
    (tmp_path / "x.csv").write_text(RECORD)
    text = filled(PAGE.replace("run=a|b", "mixer!=attention"), tmp_path)
    assert "| FEM |" in text
    assert "| attention |" not in text
