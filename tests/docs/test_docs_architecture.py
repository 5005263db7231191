"""The map of the source names what is there, and all of it."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
NAMED = set(re.findall(r"`((?:fem|research|tests|docs|benchmarks)/[\w/.]*)`", PAGE))


def test_every_path_that_the_map_names_is_there():
    assert len(NAMED) > 20
    for path in NAMED:
        assert (ROOT / path).exists(), path


def test_every_read_has_its_row_which_ends_with_its_definition():
    rows = [line.rstrip(" |") for line in PAGE.splitlines() if line.startswith("| ")]
    for folder in (ROOT / "fem" / "ops").iterdir():
        if folder.is_dir() and folder.name not in ("common", "__pycache__"):
            (row,) = (row for row in rows if f"`fem/ops/{folder.name}/`" in row)
            assert row.endswith(".py`"), folder.name


def test_every_part_of_the_package_is_on_the_map():
    for part in (ROOT / "fem").iterdir():
        if part.is_dir() and part.name != "__pycache__":
            assert f"fem/{part.name}/" in NAMED, part.name
