"""Every experiment has a file of the record; a cell of it can be named in an address."""

import csv
from pathlib import Path

import pytest

from fem_research.record import EXPERIMENTS, FILES, append

RESULTS = Path(__file__).parents[1] / "results"
SELECTABLE = ("run", "task", "mixer", "seed", "rate", "steps")


def read(name: str) -> list[dict]:
    with open(RESULTS / f"{name}.csv", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("name", sorted({FILES.get(name, name) for name in EXPERIMENTS} | {"pooling"}))
def test_every_row_says_what_was_run_and_where(name):
    for row in read(name):
        assert all(row[column] for column in ("run", "task", "mixer", "machine")), row
        assert not any(sign in row.get(column, "") for column in SELECTABLE for sign in ("|", ", ", ": ")), row


def test_an_experiment_without_trainings_adds_nothing(tmp_path):
    assert append(tmp_path, "demo", "fem demo", {"experiment": "demo"}, {}) == []
    assert not list(tmp_path.iterdir())


def test_times_stand_in_the_record_in_milliseconds_under_the_names_that_are_typed(tmp_path):
    costs = {"attention": {"forward_s": 0.5, "train_s": 1.0, "parameters": 9}, "FEM/r32": {"train_s": 2.0}}
    case = {"part": "layer", "size": {"batch": 2, "time": 512, "width": 512, "heads": 8}, "dtype": "float32"}
    results = {"bench": [case | {"layers": 0, "device": "cpu", "results": costs}]}
    config = {"experiment": "bench", "recipe": {}, "hardware": {"processor": "a CPU", "threads": 1, "gpus": []}}
    [path] = append(tmp_path, "layer", "fem bench", config | {"versions": {"python": "3"}, "date": "2026"}, results)
    with open(path, newline="") as file:
        rows = {row["mixer"]: row for row in csv.DictReader(file)}
    assert path.name == "cost.csv"
    assert rows.keys() == {"attention", "FEM/r32"}
    assert (rows["attention"]["train_ms"], rows["FEM/r32"]["train_ms"]) == ("1000.0", "2000.0")
    assert (rows["attention"]["mode"], rows["FEM/r32"]["mode"]) == ("torch's layer", "")
