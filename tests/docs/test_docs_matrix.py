"""The table of priors in limits says what the priors do when they are tried."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="what an engine can serve is asked of a model: needs free-energy-mixer[lm]")

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs" / "figures"))

import matrix  # noqa: E402


def test_the_table_is_what_was_found_by_trying():
    assert matrix.table() in (ROOT / "docs" / "limits.md").read_text()
