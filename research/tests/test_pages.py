"""The commands that the pages of results quote are still taken: their options and values, without running them."""

import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest

from fem.cli import load
from fem_research.commands import EXPERIMENTS

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
