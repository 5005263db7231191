"""The commands that the pages of results quote are still taken: their options and values, without running them."""

import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest

from fem.cli import load
from fem_research.commands import EXPERIMENTS
from fem_research.page_tables import PICTURE, TABLE, parsed, selected, with_numbers

PAGES = Path(__file__).parents[1] / "results"
QUOTED = re.compile(rf"`fem ((?:{'|'.join(EXPERIMENTS)})\b[^`]*)`")


class Taken(Exception):
    pass


def taken(*arguments, **options):
    raise Taken


@pytest.mark.parametrize("page", [page.name for page in PAGES.glob("*.md") if QUOTED.search(page.read_text())])
def test_every_command_of_a_page_is_taken(page, monkeypatch, tmp_path):
    for quoted in QUOTED.findall((PAGES / page).read_text()):
        name, *options = shlex.split(quoted)
        monkeypatch.setattr(import_module(f"fem_research.{EXPERIMENTS[name].run}"), "run", taken)
        with pytest.raises(Taken):
            load(name).main([*options, "--output", str(tmp_path)], standalone_mode=False)


def runs_of(page: str) -> tuple[set[tuple[str, str]], set[tuple[str, str]]]:
    """The record's file and name of every run that a page's tables and pictures show, and of those of its settings."""
    shown, listed = set(), set()
    for _, file, selection, by, fields in TABLE.findall(page):
        rows = with_numbers(PAGES, file, parsed(selection), fields.split(" ")[0])
        (listed if "machine" in by else shown).update((file, row["run"]) for row in rows)
    for file, selection, *_ in PICTURE.findall(page):
        shown.update((file.replace("_curves", ""), row["run"]) for row in selected(PAGES / file, parsed(selection)))
    return shown, listed


@pytest.mark.parametrize("page", [page.name for page in PAGES.glob("*.md") if "## Settings" in page.read_text()])
def test_every_run_that_a_page_shows_stands_in_its_settings(page):
    shown, listed = runs_of((PAGES / page).read_text(encoding="utf-8"))
    assert not sorted(shown - listed)
