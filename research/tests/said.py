"""What the claims on pages of results are drawn from."""

import json
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

PAGES = Path(__file__).parents[1] / "results"
MEASURED = re.compile(r"(?<![\w.])(?:\d+)?\.\d+(?!\w*\.\d)|\b\d+ %")


@cache
def _kept(page: str) -> dict:
    return json.loads((PAGES / f"{page}.json").read_text())


def results(page: str) -> dict:
    """The numbers that a page keeps."""
    return _kept(page).get("results", _kept(page))


def recipe(page: str) -> dict:
    return _kept(page)["config"]["recipe"]


def span(values: Sequence[float]) -> tuple[float, float]:
    return min(values), max(values)


def level_at() -> float:
    """A step's cost, over attention's, at which slim FEM ends level in equal time: between its two schedules."""
    timed, usual = results("ablate_16m_time")["ablate"], results("ablate_16m")["ablate"]
    slim, attention = "full/r8", "-C,G,T,L"
    share = timed[slim]["steps"] / timed[attention]["steps"]
    behind, missing = (timed[slim]["loss"] - usual[row]["loss"] for row in (attention, slim))
    return 1 / (share + (1 - share) * behind / missing)
