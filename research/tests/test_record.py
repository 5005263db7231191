"""Every experiment has a file of the record; a cell of it can be named in an address."""

import csv
from pathlib import Path

import pytest

from fem_research.record import EXPERIMENTS, FILES, append, rows_of

RESULTS = Path(__file__).parents[1] / "results"
FORECAST = {"data": "ETTh1", "horizon": 96, "maes": [0.1], "lookbacks": [336], "sizes": [9], "seconds": [1.0]}
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
    assert append(tmp_path, "inspect", "fem inspect", {"experiment": "inspect"}, {}) == []
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


def test_tasks_of_mad_stand_in_the_record_in_the_order_of_the_run():
    tasks = ["memorization", "compression", "selective-copying", "in-context-recall"]
    score = {task: {"seeds": [0.5]} for task in tasks} | {"average": {"seeds": [0.5]}}
    found = {"mad": score, "steps": {"to": 0.9}, "sizes": {task: size for size, task in enumerate(tasks)}}
    rows = list(EXPERIMENTS["mad"]({"seed": 0, "profile": "laptop"}, {"mad": {"normal": {"softmax": found}}}))
    assert [row["task"] for row in rows] == tasks
    assert [row["parameters"] for row in rows] == [0, 1, 2, 3]  # by the task's vocabulary


def test_mad_and_natural_sets_say_which_rates_were_tried_and_mad_the_benchmark_s_own_scores():
    score = {"memorization": {"seeds": [0.5]}}
    found = {"mad": score, "mad_macro": {"memorization": {"seeds": [0.25]}}, "steps": {"to": 0.9}}
    found["sizes"] = {"memorization": 9}
    recipe = {"seed": 0, "profile": "paper-one", "learning_rates": "1e-3, 3e-3"}
    (row,) = EXPERIMENTS["mad"](recipe, {"mad": {"normal": {"softmax": found}}})
    assert (row["score"], row["mad_macro"], row["rate"]) == (0.5, 0.25, "1e-3 3e-3")
    found = {"accuracy": [0.5], "over": None, "parameters": 9, "rates": {"0.001": 7, "0.01": 3}}
    (row,) = EXPERIMENTS["natural"]({"seed": 0, "steps": 60}, {"natural": {"musk1": {"pool:mean": found}}})
    assert row["rate"] == "0.001:7 0.01:3"


def test_predictors_without_training_stand_in_the_record_of_argmax():
    found = {"index_accuracy": 0.5, "mse": 0.1, "error": 1.0, "hits": 0.25}
    recipe = {"form": "spread", "tokens": 64, "channels": 8, "heads": 4}
    (row,) = EXPERIMENTS["argmax"](recipe, {"baselines": {"the best constant": found}})
    assert (row["mixer"], row["score"], row["error"], row["n_head"]) == ("the best constant", 0.25, 1.0, 4)


@pytest.mark.parametrize("model, rate", [("none", 6e-4), ("softmax+CLTG", 6e-4), ("dlinear", None)])
def test_only_the_backbone_has_its_rate_and_heads(model, rate):
    recipe = {"heads": 8, "layers": 3, "epochs": 3, "learning_rate": 6e-4}
    config = {"experiment": "forecast", "recipe": recipe, "date": "2026", "versions": {"python": "3"}}
    config |= {"hardware": {"processor": "a CPU", "threads": 1, "gpus": []}}
    (row,) = rows_of(config, {"forecast": [FORECAST | {"model": model, "seeds": [0], "mses": [0.3]}]})
    assert (row.get("rate"), row["n_head"]) == (rate, rate and 8)
    assert (row["layers"], row["epochs"]) == (rate and 3, rate and 3)


def test_a_row_has_what_its_own_training_measured():
    several = {"model": "dlinear", "seeds": [0, 1], "mses": [0.3, 0.4]}
    several |= {"maes": [0.1, 0.2], "lookbacks": [512, 1024], "sizes": [9, 17], "seconds": [1.0, 3.0]}
    rows = EXPERIMENTS["forecast"]({"heads": 8, "learning_rate": 6e-4}, {"forecast": [FORECAST | several]})
    names = ("seed", "score", "mae", "lookback", "parameters", "cpu_seconds")
    assert [tuple(row[name] for name in names) for row in rows] == [
        (0, 0.3, 0.1, 512, 9, 1.0),
        (1, 0.4, 0.2, 1024, 17, 3.0),
    ]
    found = {"accuracies": [0.5, 0.25], "losses": [1.0, 2.0], "speeds": [3.0, 4.0], "parameters": 9}
    recipe = {"seed": 5, "data": "digits", "epochs": 1, "learning_rate": 0.001}
    rows = EXPERIMENTS["vision"](recipe, {"vision": {"FEM": found}})
    names = ("seed", "score", "loss", "images_per_second")
    assert [tuple(row[name] for name in names) for row in rows] == [(5, 0.5, 1.0, 3.0), (6, 0.25, 2.0, 4.0)]


def test_the_demo_s_language_models_join_the_record_with_their_curves(tmp_path):
    recipe = {"seed": 3, "steps": 2, "batch_size": 4, "context": 8, "layers": 1, "mlp_width": 8, "vocabulary": 300}
    found = {"val_losses": [5.5], "parameters": 9, "tokens_per_second": 2.0}
    curves = {"fem": [[{"step": 2, "seconds": 1.5, "val_loss": 5.5}]]}
    results = {"lm": {"fem": found}, "lm_curves": curves, "curves": {"fem": [[{"step": 0, "hits": 0.5}]]}}
    config = {"experiment": "demo", "recipe": recipe, "hardware": {"processor": "a CPU", "threads": 1, "gpus": []}}
    paths = append(tmp_path, "demo", "fem demo", config | {"versions": {"python": "3"}, "date": "2026"}, results)
    assert [path.name for path in paths] == ["language.csv", "language_curves.csv"]
    (row,), (point,) = (list(csv.DictReader(path.read_text().splitlines())) for path in paths)
    assert (row["mixer"], row["seed"], row["score"], row["tokens"]) == ("FEM", "3", "5.5", "64")
    assert (point["step"], point["loss"], point["seconds"]) == ("2", "5.5", "1.5")
