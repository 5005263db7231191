"""Pictures of experiments are written."""

import math

import pytest

pytest.importorskip("matplotlib", reason="needs free-energy-mixer[cli]")

from matplotlib.image import imread

from fem_research.common import pictures
from fem_research.common.plots import Panel, dots, learning_curves


def test_curves_and_dots_are_written(tmp_path):
    series = {"FEM": [([0, 1], [1.0, 0.5]), ([0, 1], [1.1, 0.6])], "other": [([0, 1], [1.0, 0.9])]}
    learning_curves(tmp_path / "curves.png", "title", [Panel("loss", "step", series)] * 2, {"FEM": "#1f5fbf"})
    height, width, _ = imread(tmp_path / "curves.png").shape
    assert height > width  # a phone shows panels one below the other at a size that can be read
    scores = {str(number): {"FEM": [number]} for number in range(6)}
    dots(tmp_path / "six.png", "title", scores, {})
    assert imread(tmp_path / "six.png").shape[1] < 1200  # pixels that a page has room for
    scores = {"one": {"FEM": [0.5, 0.6], "other": [0.4]}, "two": {"other": [1]}}
    dots(tmp_path / "dots.png", "title", scores, {"FEM": "#1f5fbf"})
    diverged = Panel("loss", "step", {"FEM": [([1, 2], [math.nan, math.inf])]}, logarithmic=True)
    learning_curves(tmp_path / "diverged.png", "title", [diverged], {})
    for name in ("curves.png", "dots.png", "diverged.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_forecasters_have_the_names_and_colours_of_the_tables(tmp_path, monkeypatch):
    monkeypatch.setattr(pictures, "dots", lambda path, title, panels, colours: drawn.update(colours))
    drawn = {}
    pictures.scores(tmp_path, [{"task": "ETTh1", "mixer": name, "score": 0.4} for name in ("none", "dlinear", "FEM")])
    assert drawn == {"no mixer": "#111827", "DLinear": "#a08c74", "FEM": "#1f5fbf"}
