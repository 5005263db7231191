"""`fem ablate`: the rows, equal sizes and starts, the choice of the learning rate, and resuming."""

import csv
import json
import math
import re
from dataclasses import replace
from itertools import combinations
from statistics import mean

import pytest
import torch

pytest.importorskip("transformers", reason="needs free-energy-mixer[lm]")

from fem.models import FEMConfig
from fem.models.presets import count_parameters
from fem.train.model import build_model
from fem_research.common.grid import Grid, keep
from fem_research.common.mixers import NUMBERED, OPTION, canonical
from fem_research.common.watch import Watch
from fem_research.lm import ablate
from fem_research.lm.settings import NAMED_OPTIONS, OPTIONS, ROWS, mixer_name, remark, row_fields
from fem_research.lm.small import LanguageRecipe, model_config
from fem_research.report import add_runs
from fem_research.runs.run import progress

TINY = ablate.AblateRecipe(
    rows="full -C,G,T +G",
    learning_rates="0.001,0.01",
    seeds=2,
    layers=1,
    width=32,
    heads=2,
    mlp_width=88,
    vocabulary=270,
    context=16,
    batch=2,
    steps=3,
    validations=3,
)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("the sun sees the moon and the moon sees the sun. " * 60)
    return path


def test_rows_have_the_parts_their_names_say():
    for row, (parts, _) in ROWS.items():
        fields = row_fields(row, "softmax")
        named = set(row.removeprefix("-").removeprefix("+").split(","))
        wanted = {"full": set("CLTG")}.get(row, named if row.startswith("+") else set("CLTG") - named)
        assert set(parts) == wanted
        switches = {"C": "use_conv", "L": "use_lse", "T": "use_temperature", "G": "use_outer_gate"}
        assert {letter for letter, field in switches.items() if fields[field]} == wanted
    assert {(a, b) for a, b in combinations(ROWS, 2) if ROWS[a].parts == ROWS[b].parts} == set()


def test_every_option_of_a_row_is_put_into_words():
    assert OPTIONS.keys() == NUMBERED.keys()
    assert NAMED_OPTIONS.keys() == set(re.findall("[a-z]{3,}", OPTION.pattern))
    assert remark("-C/r8/s.5").endswith("gates of rank 8, .5 read F")


@pytest.mark.parametrize("prior", ["softmax", pytest.param("gla", marks=pytest.mark.slow), "rnn_softmax"])
def test_rows_have_equal_parameters(prior):
    recipe = LanguageRecipe()
    attention = model_config(recipe, row_fields("-C,G,T,L", "softmax"), recipe.vocabulary)
    wanted = count_parameters(attention)
    for row in ROWS:
        config = model_config(recipe, row_fields(row, prior), recipe.vocabulary)
        assert isinstance(config, FEMConfig)
        assert config.prior_type == prior
        assert count_parameters(config) == pytest.approx(wanted, rel=0.01)


def test_a_mixer_that_is_not_normalised_is_trained_so():
    """`fem ablate --prior mamba --mixers FEM-Mamba-norm` trained the normalised one."""
    names = "FEM-Mamba-norm,FEM-Mamba,mamba,mamba/norm,mamba+CL/lambda"
    recipe = replace(TINY, prior="mamba", rows=names)
    rows = recipe.row_names()
    assert rows == ["full-norm", "full", "-C,G,T,L", "-C,G,T,L/norm", "-G,T/lambda"]
    configs = [model_config(TINY.language(0.001, 0), row_fields(row, "mamba"), 270).mixer_configs()[0] for row in rows]
    assert [config.normalize for config in configs] == [False, True, False, True, True]
    assert [config.learns_lambda for config in configs] == [True, True, False, False, True]
    assert [mixer_name(row, "mamba") for row in rows] == [canonical(name) for name in names.split(",")]
    assert remark("full-norm/r8") == "the Free Energy Mixer, unnormalised, gates of rank 8"
    assert replace(recipe, rows=" ".join(rows)).row_names() == rows


def test_a_kept_swiglu_is_as_wide_as_attention_s():
    recipe = replace(TINY.language(0.001, 0), mlp="kept")
    assert model_config(recipe, row_fields("full", "softmax"), 270).intermediate_size == TINY.mlp_width


def test_rows_start_from_the_same_embeddings():
    recipe = TINY.language(0.001, seed=5)
    models = [build_model(model_config(recipe, row_fields(row, "softmax"), 270), 5) for row in ("full", "+G")]
    assert torch.equal(*(model.get_input_embeddings().weight for model in models))


def test_laser_reads_the_free_energy_at_beta_one():
    model = build_model(model_config(TINY.language(0.001, 0), row_fields("-C,G,T", "softmax"), 270), 0)
    mixer = model.model.layers[0].mixer
    assert mixer.beta is None
    reading = mixer.inspect(torch.randn(1, 6, 32))
    assert torch.equal(reading.beta, torch.ones_like(reading.beta))
    assert reading.lambda_ is None or torch.all(reading.lambda_ == 1)


def test_every_row_takes_its_own_best_rate_on_the_first_seed_alone(tmp_path):
    losses = {("full", 0.001, 0): 3.0, ("full", 0.01, 0): 2.0, ("+G", 0.001, 0): 1.0, ("+G", 0.01, 0): math.inf}
    asked = []

    def train(jobs, folder):
        for job in jobs:
            cell = job.row, job.language.learning_rate, job.language.seed
            asked.append(cell)
            record = {"val_loss": losses.get(cell, 7.0), "parameters": 10, "tokens_per_second": 1.0, "curve": []}
            keep(job, folder, record)
            yield record

    def job(row, rate, seed):
        return ablate.Job(row=row, mixer={}, language=TINY.language(rate, seed), text="x")

    grid = Grid(tmp_path, train, progress(), "trainings")
    tuned = grid.tuned(["full", "+G"], (0.001, 0.01), range(2), job, lambda record: record["val_loss"])
    ablation = ablate.Ablation("softmax", *tuned, {})
    assert [ablation.best(row) for row in ("full", "+G")] == [0.01, 0.001]
    assert {(row, rate) for row, rate, seed in asked if seed == 1} == {("full", 0.01), ("+G", 0.001)}
    table = {row["mixer"]: row for row in ablation.table()}
    assert table["FEM"]["loss"] == pytest.approx((2.0 + 7.0) / 2)
    assert table["FEM"]["sd"] == pytest.approx(5 / math.sqrt(2))
    assert [list(row) for row in ablation.tuning_table()] == [["mixer", "0.001", "0.01"]] * 2
    assert [row["mixer"] for row in ablation.table()] == ["FEM", "attention+G"]


def test_an_ablation_writes_what_it_promises_and_goes_on(text, tmp_path, monkeypatch):
    recipe = replace(TINY, text=text, rows="full/l-2 -C,G,T/conv")
    found = ablate.run(recipe, tmp_path / "run")
    results = found["ablate"]
    assert list(results) == ["FEM/l-2", "attention+L/conv"]
    assert [[point["tokens"] for point in curve] for curve in found["curves"]["attention+L/conv"]] == [[32, 64, 96]] * 2
    runs = sorted((tmp_path / "run" / "runs").iterdir())
    assert len(runs) == 6
    mixers = [json.loads(path.read_text())["job"]["mixer"] for path in runs]
    assert all(mixer["lambda_init"] == (-2.0 if mixer["use_temperature"] else 0.0) for mixer in mixers)
    with open(tmp_path / "run" / "table.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["loss"]) for row in rows] == [mean(row["loss"]) for row in results.values()]
    (tmp_path / "record").mkdir()
    add_runs([tmp_path / "run"], tmp_path / "record")
    for name, lines, field in (("language", 4, "score"), ("language_curves", 6, "loss")):
        with open(tmp_path / "record" / f"{name}.csv", encoding="utf-8") as file:
            record = [row for row in csv.DictReader(file) if row["mixer"] == "attention+L/conv"]
        assert len(record) == lines
        last = [float(row[field]) for row in record if row.get(field) and row.get("step", "3") == "3"]
        assert last == results["attention+L/conv"]["loss"]
    assert {float(row["rate"]) for row in record} == {results["attention+L/conv"]["learning_rate"]}  # of every point
    assert "tokens" not in record[0]
    for picture in ("scores.png", "curves.png"):
        assert (tmp_path / "run" / picture).read_bytes().startswith(b"\x89PNG")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["tokens"] for line in lines if (line["row"], line["seed"]) == ("full/l-2", 0)] == [32, 64, 96]

    trained = []
    train_job = ablate.train_job
    monkeypatch.setattr(ablate, "train_job", lambda job, *rest: (trained.append(job.row), train_job(job, *rest))[1])
    runs[0].write_text("cut off")
    runs[1].unlink()
    again = ablate.run(recipe, tmp_path / "run")["ablate"]
    assert len(trained) == 2
    for row in results:
        assert again[row]["loss"] == results[row]["loss"]


def test_in_equal_time_slower_rows_take_fewer_steps(text, tmp_path, monkeypatch):
    recipe = replace(TINY, text=text, rows="full -C,G,T,L", learning_rates="0.001", seeds=1, steps=7, equal_time=True)
    clock = {"full": 0.3, "-C,G,T,L": 0.2}
    monkeypatch.setattr(ablate, "alternate", lambda steps, *how: {row: clock[row] for row in steps})
    table = ablate.run(recipe, tmp_path)["ablate"]
    taken = {row: (found["steps"], found["ms"]) for row, found in table.items()}
    assert taken == {"FEM": (5, 300), "attention": (7, 200)}  # 7 steps of .2 s take as long as 4.7 of .3 s
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    for row, mixer in (("full", "FEM"), ("-C,G,T,L", "attention")):
        assert max(line["step"] for line in lines if line["row"] == row) == taken[mixer][0]
    page = (tmp_path / "report.md").read_text()
    assert ", equal time\n\nBlocks: 1, of width " in page
    assert "--equal-time" in page

    clock["full"] = 9.0  # what was measured is kept: the trainings of a run that goes on are the same
    assert ablate.run(recipe, tmp_path)["ablate"] == table
    for changed in ({"rows": "full -C,G,T,L +G"}, {"width": 16}):
        with pytest.raises(ValueError, match="holds what other models cost, or is damaged; remove it"):
            ablate.run(replace(recipe, **changed), tmp_path)
    (tmp_path / ablate.COSTS).write_text('{"model": {', encoding="utf-8")
    with pytest.raises(ValueError, match="or is damaged"):
        ablate.run(recipe, tmp_path)


def test_what_a_step_of_every_row_costs_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(ablate, "SECONDS", 0.0)
    seconds = ablate.step_seconds(replace(TINY, equal_time=True), tmp_path / "new")
    assert seconds.keys() == {"full", "-C,G,T", "+G"}
    assert min(seconds.values()) > 0


def test_a_training_that_was_stopped_ends_as_one_that_was_not(text, tmp_path, monkeypatch):
    recipe = replace(TINY, text=text, rows="full", learning_rates="0.001", seeds=1)
    begin, begun = Watch.on_step_begin, []

    def stopped_in_the_third_step(watch, args, state, control, **given):
        begun.append(state.global_step)
        if len(begun) == 3:
            raise KeyboardInterrupt
        begin(watch, args, state, control, **given)

    ablate.run(recipe, tmp_path / "whole")
    monkeypatch.setattr(Watch, "on_step_begin", stopped_in_the_third_step)
    with pytest.raises(KeyboardInterrupt):
        ablate.run(recipe, tmp_path / "stopped")
    ablate.run(recipe, tmp_path / "stopped")
    assert begun == [0, 1, 2, 2]
    ((whole, again),) = zip(*(sorted((tmp_path / name / "runs").iterdir()) for name in ("whole", "stopped")))
    assert again.name == whole.name
    whole, again = (json.loads(path.read_text()) for path in (whole, again))
    assert again["curve"] == whole["curve"]
    assert again["val_loss"] == whole["val_loss"]


def test_a_training_whose_weights_are_not_finite_ends_and_loses(text, tmp_path):
    results = ablate.run(replace(TINY, text=text, rows="full", learning_rates="0.001,1e30", seeds=1), tmp_path)
    assert results["ablate"]["FEM"]["validation_by_rate"]["1e+30"] == math.inf
    assert all(map(math.isfinite, results["ablate"]["FEM"]["loss"]))


def test_rows_are_called_by_the_paper_s_names_or_by_the_mixers():
    rows = "attention, FEM,attention+LTG/r8,softmax+L"
    assert ablate.AblateRecipe(rows=rows).row_names() == ["-C,G,T,L", "full", "-C/r8", "-C,G,T"]
    assert ablate.AblateRecipe(rows="GLA,FEM-GLA", prior="gla").row_names() == ["-C,G,T,L", "full"]
