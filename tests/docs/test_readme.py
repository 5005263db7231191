"""The README's Python runs as it stands, and what it links to is there."""

import re
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]


def test_the_examples_run_one_after_the_other():
    names = {}
    torch.manual_seed(0)
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL):
        exec(block, names)
    torch.testing.assert_close(names["y"], names["layer"](names["x"]))


def test_every_link_leads_somewhere():
    for page in PAGES:
        text = page.read_text()
        for target in re.findall(r"\]\(([^)#:]+)\)", text) + re.findall(r'(?:src|srcset)="([^":]+)"', text):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_test_that_the_equations_name_exists():
    text = (ROOT / "docs" / "equations.md").read_text()
    theory = (ROOT / "tests" / "theory" / "test_theory.py").read_text()
    for name in set(re.findall(r"T::(\w+)", text)) - {"name"}:
        assert f"def test_{name}(" in theory, name
    for path in re.findall(r"`(tests/[\w/]+\.py)`", text):
        assert (ROOT / path).exists(), path
