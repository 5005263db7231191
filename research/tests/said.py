"""What the claims on pages of results are drawn from."""

import json
from functools import cache
from pathlib import Path

PAGES = Path(__file__).parents[1] / "results"


@cache
def results(page: str) -> dict:
    """The numbers that a page keeps."""
    kept = json.loads((PAGES / f"{page}.json").read_text())
    return kept.get("results", kept)
