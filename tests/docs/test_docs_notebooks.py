"""The notebooks run in a fresh kernel, and are kept with what they show."""

import json
import re
from pathlib import Path

import pytest

from fem_research.common.names import FULL_COLOURS, GREYS, OTHER_GREY, PART_COLOURS

nbclient = pytest.importorskip("nbclient", reason="running notebooks needs the extra 'dev'")
nbformat = pytest.importorskip("nbformat", reason="running notebooks needs the extra 'dev'")

NOTEBOOKS = sorted((Path(__file__).parents[2] / "docs" / "notebooks").glob("*.ipynb"))
named = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def test_there_are_notebooks():
    assert len(NOTEBOOKS) >= 2


@named
@pytest.mark.slow
def test_a_notebook_runs_from_top_to_bottom(path, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(path, as_version=4)
    kernel = {"kernel_name": "python3", "resources": {"metadata": {"path": tmp_path}}}
    nbclient.NotebookClient(notebook, timeout=600, **kernel).execute()
    pictures = [output for cell in code(notebook) for output in cell.outputs if "image/png" in output.get("data", {})]
    assert len(pictures) >= 2


@named
def test_a_notebook_is_kept_with_its_results(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert [cell.execution_count for cell in code(notebook)] == list(range(1, len(code(notebook)) + 1))
    kinds = {output.output_type for cell in code(notebook) for output in cell.outputs}
    assert kinds <= {"stream", "display_data", "execute_result"}, "no errors"
    assert {output.name for cell in code(notebook) for output in cell.outputs if "name" in output} <= {"stdout"}
    assert path.stat().st_size < 300_000


@named
def test_a_notebook_tells_nothing_about_the_machine_that_ran_it(path):
    text = json.dumps(json.loads(path.read_text()))
    assert not any(word in text for word in ("site-packages", "/home/", "/work/", "/tmp/"))


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@named
def test_a_mixer_has_its_one_name_and_colour(path):
    """Colours of mixers come from `fem_research.common.names`, not from the notebook."""
    own = {*GREYS.values(), *FULL_COLOURS.values(), *PART_COLOURS.values()} - {OTHER_GREY}
    source = "\n".join(cell.source for cell in code(nbformat.read(path, as_version=4)))
    assert not own & set(re.findall(r"color=\"(#\w+)\"", source))
    assert "softmax attention" not in source
