"""The equations' page: every statement has a test, and the numbers of its example are what the library computes."""

import math
import re
from pathlib import Path

import pytest
import torch

from fem.theory import free_energy, hidden_temperature, kl_gap, posterior, posterior_mean

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "equations.md").read_text()


def tables():
    """The tables of the page, each a list of rows of cells; a bar within code is no border."""
    for lines in re.findall(r"(?:^\|.*\n)+", PAGE, re.MULTILINE):
        rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines.splitlines()]
        yield [rows[0], *rows[2:]]


def test_every_statement_names_its_test_and_the_test_is_there():
    stated = [table for table in tables() if table[0][-1] in ("test", "tests")]
    assert sum(len(table) - 1 for table in stated) > 40
    for header, *rows in stated:
        for row in rows:
            assert len(row) == len(header), row
            assert re.search(r"`T::\w+`|`tests/[\w/]*test_\w+\.py`|the same", row[-1]), row
    theory = (ROOT / "tests" / "theory" / "test_theory.py").read_text()
    for name in set(re.findall(r"T::(\w+)", PAGE)) - {"name"}:
        assert f"def test_{name}(" in theory, name
    for path in re.findall(r"`(tests/[\w/]+\.py)`", PAGE):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("row", next(tables())[1:], ids=lambda row: f"beta = {row[0]}")
def test_the_example_of_three_tokens_is_what_the_library_computes(row):
    p, v = torch.tensor([0.6, 0.3, 0.1]).double(), torch.tensor([0.0, 1.0, 3.0]).double()
    beta = math.log1p(math.exp(1.8)) if row[0] == "1.953" else float(row[0])
    q = " ".join(f"{share:.3f}" for share in posterior(p, v, beta))
    numbers = (read(p, v, beta).item() for read in (free_energy, kl_gap, posterior_mean))
    found, gap, mean = (f"{number:.3f}" for number in numbers)
    assert row[1:] == [found, gap, q, mean]


def test_half_way_is_the_hidden_temperature_that_the_page_says():
    p, v = torch.tensor([0.6, 0.3, 0.1]).double(), torch.tensor([0.0, 1.0, 3.0]).double()
    assert f"F({hidden_temperature(p, v, 0.5, 1.953).item():.3f})" in PAGE
