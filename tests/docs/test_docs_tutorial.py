"""The tutorial's Python runs as it stands, and prints what its comments say."""

import contextlib
import io
import re
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="the tutorial's models need the extra 'lm'")

PAGE = Path(__file__).parents[2] / "docs" / "tutorial.md"
PRINTED = re.compile(r"^\s*print\(.*\)  # (.*)$", re.MULTILINE)


def test_every_block_runs_without_a_warning_and_prints_what_stands_beside_it(caplog):
    names = {}
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) > 10
    for block in blocks:
        assert block.count("print(") == len(PRINTED.findall(block)), f"every print says what it prints:\n{block}"
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(block, names)
        assert output.getvalue().splitlines() == PRINTED.findall(block), block
    assert [record.message for record in caplog.records if record.levelname != "INFO"] == []
