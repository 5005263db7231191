"""Forecasting: the paper's backbone, its training, the command and its report."""

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from waves import command, ett, waves

from fem import models
from fem_research.forecast import experiment, training
from fem_research.forecast.series import Windows
from fem_research.forecast.settings import PROFILES, ForecastRecipe, width_for
from fem_research.forecast.training import ForecastBackbone, build_backbone
from fem_research.runs.run import progress

HOST = {"width": 16, "layers": 2, "heads": 2, "dropout": 0.0}
TINY = {"lookback": 24, "horizon": "5", "width": 16, "layers": 1, "heads": 2, "epochs": 2, "seeds": 1}


@pytest.fixture
def csv(tmp_path):
    path = tmp_path / "waves.csv"
    waves(300).to_csv(path, index=False)
    return path


# The backbone


def bare_backbone(channels=3, lookback=23, horizon=5):
    """The backbone without blocks, in which no token sees another."""
    backbone = ForecastBackbone(channels, lookback, horizon, 16, nn.Sequential(), 0.0).double()
    with torch.no_grad():
        for parameter in backbone.parameters():
            parameter.normal_()
    return backbone


def rms_norm(x, weight):
    return x / np.sqrt(np.mean(x**2) + 1e-5) * weight


def test_the_backbone_is_the_recipe_of_the_paper():
    backbone = bare_backbone()
    weights = {name: parameter.detach().numpy() for name, parameter in backbone.named_parameters()}
    history, future = torch.randn(2, 23, 3).double() + 4, torch.randn(2, 5, 3).double()

    def token(kind, row, position, channel):
        z = rms_norm(
            weights[f"tokens.{kind}.0.weight"] @ row + weights[f"tokens.{kind}.0.bias"],
            weights[f"tokens.{kind}.1.weight"],
        )
        z = z + weights["tokens.position"][position] + weights["tokens.channel"][channel, position]
        z = rms_norm(z, weights["tokens.norm.weight"])
        return weights["head.1.weight"] @ rms_norm(z, weights["head.0.weight"]) + weights["head.1.bias"]

    forecast, squared = np.empty((2, 5, 3)), []
    for b in range(2):
        x = history[b].numpy()
        level, spread = x[-5:].mean(0), x.std(0, ddof=1) + 1e-8
        segments = np.concatenate([np.zeros((2, 3)), (x - level) / spread]).reshape(5, 5, 3)
        for c in range(3):
            for n in range(5):
                successor = token("main", segments[n, :, c], 2 * n + 1, c)
                if n < 4:
                    squared += list((successor - segments[n + 1, :, c]) ** 2)
            forecast[b, :, c] = successor * spread[c] + level[c]
    assert np.allclose(backbone(history).detach(), forecast)
    loss = np.mean((forecast - future.numpy()) ** 2) + np.mean(squared)
    assert backbone.loss(history, future).item() == pytest.approx(loss)


def test_context_tokens_alone_know_the_other_channels():
    tokens = bare_backbone().tokens
    segments = torch.randn(1, 3, 5, 5).double()
    other = segments.clone()
    other[:, 2] += 1
    moved = (tokens(segments) - tokens(other)).abs().amax(-1)[0, 0]
    assert (moved[0::2] > 0).all()
    assert (moved[1::2] == 0).all()


@settings(max_examples=8, deadline=None)
@given(scale=st.floats(0.1, 10), shift=st.floats(-10, 10))
def test_forecasts_move_with_the_unit_of_measurement(scale, shift):
    torch.manual_seed(1)
    backbone = build_backbone("softmax+CLTG", 2, 23, 5, **HOST).double().eval()
    history = torch.randn(3, 23, 2).double()
    assert torch.allclose(backbone(scale * history + shift), scale * backbone(history) + shift, atol=1e-5 * scale)


@pytest.mark.parametrize("mixer", ["none", "softmax+CLTG", "gla+CLTG", "mamba+CLTG", "rnn_softmax+CLTG", "gla-norm"])
def test_every_mixer_stands_in_a_backbone_of_equal_parameters(mixer):
    size = {"width": 64, "layers": 3, "heads": 8, "dropout": 0.1}
    count = [sum(p.numel() for p in build_backbone(name, 7, 64, 8, **size).parameters()) for name in (mixer, "softmax")]
    assert count[0] == pytest.approx(count[1], rel=2e-3)


def test_a_kept_mlp_is_four_times_the_width_beside_a_mixer_of_the_authors_width():
    kept = build_backbone("mamba+CLTG/paper", 7, 64, 8, **HOST | {"width": 64}, mlp="kept").blocks
    assert (kept[0].layer.config.fem_dim, kept[1].layer[0].out_features) == (32, 4 * 64)


def test_slim_gates_start_as_in_every_other_experiment():
    gate = build_backbone("softmax+LTG/r4", 7, 64, 8, **HOST | {"width": 64}).blocks[0].layer.gate.inner
    assert gate.up.weight.std().item() == pytest.approx(4**-0.5, rel=0.3)  # it was .02, and lambda did not move


def test_widths_are_the_paper_s():
    assert [width_for(channels) for channels in (7, 21, 137)] == [64, 128, 352]


def test_without_a_mixer_the_forecast_sees_the_last_segment_alone():
    history = torch.randn(2, 25, 2)
    changed = torch.cat([history[:, :20].flip(1), history[:, 20:]], 1)
    for mixer, blind in (("none", True), ("softmax+CLTG", False)):
        backbone = build_backbone(mixer, 2, 25, 5, **HOST).eval()
        moved = (backbone(changed) - backbone(history)).abs().max()
        assert (moved < 1e-5) == blind, (mixer, moved)


# Training


def test_errors_are_over_all_windows_steps_and_channels():
    data = Windows(torch.randn(101, 3), 13, 7)  # 82 windows: one batch of 64 and a part of one
    squared, absolute = [], []
    for first in range(82):
        last, future = data.rows[first + 12], data.rows[first + 13 : first + 20]
        for step in range(7):
            for channel in range(3):
                error = float(future[step, channel]) - float(last[channel])
                squared.append(error**2)
                absolute.append(abs(error))
    found = training.score(lambda history: history[:, -1:].expand(-1, 7, -1), data)
    assert found.mse == pytest.approx(sum(squared) / len(squared), rel=1e-6)
    assert found.mae == pytest.approx(sum(absolute) / len(absolute), rel=1e-6)


def test_the_learning_rate_rises_for_a_twentieth_and_falls_to_zero():
    assert [training.one_cycle(share) for share in (0.0, 0.025, 0.05, 0.525, 1.0)] == pytest.approx(
        [0.1, 0.55, 1, 0.5, 0]
    )


def test_every_training_window_is_seen_once_an_epoch():
    data = Windows(torch.arange(40.0)[:, None], 3, 2)
    seen = torch.cat([history[:, 0, 0] for history, _ in training.shuffled(data, 7)])
    assert sorted(seen.tolist()) == list(range(36))


def run_job(recipe, folder):
    (job,) = recipe.jobs()
    with progress() as bars:
        return training.train(job, folder / "checkpoint.pt", bars)


def test_a_stopped_run_goes_on_as_if_it_had_not_been(monkeypatch, csv, tmp_path):
    recipe = ForecastRecipe(data=str(csv), models="fem-sm", **TINY | {"epochs": 3})
    whole = run_job(recipe, tmp_path / "whole")
    save = training.Training.save

    def save_and_stop(self, path):
        save(self, path)
        if self.epoch == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(training.Training, "save", save_and_stop)
    with pytest.raises(KeyboardInterrupt):
        run_job(recipe, tmp_path / "cut")
    monkeypatch.undo()
    torch.manual_seed(77)
    continued = run_job(recipe, tmp_path / "cut")
    assert {**continued, "seconds": 0} == {**whole, "seconds": 0}


def test_the_weights_of_the_lowest_validation_error_are_tested(monkeypatch, csv, tmp_path):
    recipe = ForecastRecipe(data=str(csv), models="none", **TINY | {"epochs": 3})
    errors, tested = iter([3.0, 1.0, 2.0]), {}
    score, save = training.score, training.Training.save

    def keep(self, path):
        tested[self.epoch] = {name: tensor.clone() for name, tensor in self.parts["backbone"].state_dict().items()}
        save(self, path)

    def scripted(forecast, data):
        if len(tested) < 3:
            return score(forecast, data)._replace(mse=next(errors))
        tested["test"] = {name: tensor.clone() for name, tensor in forecast.state_dict().items()}
        return score(forecast, data)

    monkeypatch.setattr(training.Training, "save", keep)
    monkeypatch.setattr(training, "score", scripted)
    run_job(recipe, tmp_path)
    same = [
        epoch for epoch in (1, 2, 3) if all(torch.equal(tested[epoch][name], t) for name, t in tested["test"].items())
    ]
    assert same == [2]


def test_bfloat16_trains_in_it_and_keeps_weights_and_tests_in_float32(monkeypatch, csv, tmp_path):
    seen, read = [], ForecastBackbone._read
    monkeypatch.setattr(
        ForecastBackbone, "_read", lambda self, x: seen.append((self.training, *(y := read(self, x)))) or y
    )
    recipe = ForecastRecipe(data=str(csv), models="fem-sm", dtype="bfloat16", **TINY)
    record = run_job(recipe, tmp_path)
    assert np.isfinite(record["mse"])
    kinds = {(training, successors.dtype) for training, _, successors, _ in seen}
    assert kinds == {(True, torch.bfloat16), (False, torch.float32)}


def test_patience_ends_a_run(monkeypatch, csv, tmp_path):
    monkeypatch.setattr(training, "score", lambda forecast, data: training.Score(1.0, 1.0))
    recipe = ForecastRecipe(data=str(csv), models="none", patience=2, **TINY | {"epochs": 9})
    assert len(run_job(recipe, tmp_path)["curve"]) == 3


def test_a_run_that_diverges_says_so(monkeypatch, csv, tmp_path):
    monkeypatch.setattr(training, "score", lambda forecast, data: training.Score(float("nan"), 1.0))
    with pytest.raises(ValueError, match="no epoch has a finite validation error; lower the learning rate"):
        run_job(ForecastRecipe(data=str(csv), models="none", **TINY), tmp_path)


# The command and its report


def test_a_lookback_that_holds_no_past_segment_is_refused(monkeypatch, csv, capsys):
    assert command(monkeypatch, "--data", csv, "--lookback", 5, "--horizon", 5, "--output", csv.parent / "out") == 2
    assert "lookback must be longer than the horizon 5, got 5." in capsys.readouterr().err


def test_the_command_leaves_a_whole_run_folder_and_trains_nothing_twice(monkeypatch, csv, tmp_path):
    options = [word for name, value in TINY.items() for word in (f"--{name}", value)]
    given = ["--data", csv, "--mixers", "fem-sm,none", "--output", tmp_path / "out", *options]
    assert command(monkeypatch, *given) == 0
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names >= {"config.json", "metrics.jsonl", "results.json", "table.csv", "table4.md", "report.md"}
    assert names >= {"forecasts.png", "scores.png"}
    rows = json.loads((tmp_path / "out/results.json").read_text())["forecast"]
    assert [row["model"] for row in rows] == ["softmax+CLTG", "none"]
    page = (tmp_path / "out/report.md").read_text()
    assert "| FEM |" in page
    assert str(tmp_path) not in page
    monkeypatch.setattr(training, "train", lambda *_: pytest.fail("trained again"))
    assert command(monkeypatch, *given) == 0
    assert json.loads((tmp_path / "out/results.json").read_text())["forecast"] == rows


def test_other_values_or_other_data_are_another_run(csv, tmp_path):
    recipe = ForecastRecipe(data=str(csv), models="fem-sm", **TINY)
    moved = tmp_path / "elsewhere" / "waves.csv"
    moved.parent.mkdir()
    moved.write_bytes(csv.read_bytes())
    changed = tmp_path / "changed" / "waves.csv"
    changed.parent.mkdir()
    waves(301).to_csv(changed, index=False)
    key = recipe.jobs()[0].key
    assert replace(recipe, data=str(moved), threads=2).jobs()[0].key == key
    others = [{"seed": 1}, {"models": "none"}, {"learning_rate": 1e-3}, {"horizon": "6"}, {"data": str(changed)}]
    assert len({key, *(replace(recipe, **other).jobs()[0].key for other in others)}) == 6


def test_lookbacks_are_the_paper_s_and_the_baselines_see_the_same_futures(tmp_path):
    ett(14400).to_csv(tmp_path / "ETTh1.csv", index=False)
    given = {"data": str(tmp_path / "ETTh1.csv"), "models": "fem-sm,dlinear"}
    jobs = ForecastRecipe(**PROFILES["paper"] | given).jobs()
    assert {job.horizon: job.lookback for job in jobs if not job.is_baseline} == {
        96: 1024,
        192: 2048,
        336: 2048,
        720: 4096,
    }
    for ours, baseline in zip(jobs[::2], jobs[1::2]):
        assert baseline.is_baseline
        assert baseline.lookbacks == [512, 1024, 2048, 4096]
        lengths = {len(job.windows(rows)["test"]) for job in (ours, baseline) for rows in job.lookbacks}
        assert lengths == {2880 - ours.horizon + 1}


def test_solar_has_smaller_batches(tmp_path):
    waves(59, 137).to_csv(tmp_path / "solar.csv", index=False)
    (job,) = ForecastRecipe(data=str(tmp_path / "solar.csv"), models="none", seeds=1, lookback=9, horizon="4").jobs()
    assert job.batch == 8


def made_up(data, horizon, model, mse):
    names = {"data": data, "horizon": horizon, "model": model, "seed": 0, "lookback": 512, "parameters": 9}
    return names | {"mse": mse, "mae": 0.3, "seconds": 1.0}


def test_table_4_has_the_paper_s_figures_and_ours_where_all_horizons_were_run():
    runs = [made_up("ETTh1", horizon, "softmax+CLTG", 0.4 + horizon / 10000) for horizon in (96, 192, 336, 720)]
    runs += [made_up("ETTh1", horizon, "dlinear", 0.5) for horizon in (96, 192, 336)]
    row = next(row for row in experiment.table4(experiment.summary(runs)) if row["dataset"] == "ETTh1")
    assert row["FEM"] == "0.434 (0.419)"
    assert row["DLinear"] == "(0.413)"
    assert experiment.table4([])[0]["FEM-AFT/paper"] == "(0.223)"


# neuralforecast


def test_without_neuralforecast_one_sentence_names_the_extra(monkeypatch):
    monkeypatch.setattr(models, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install '\.\[forecast\]'"):
        _ = models.FEMForecaster


@pytest.mark.slow
def test_importing_the_models_imports_no_neuralforecast():
    code = "import sys, fem.models; print({'neuralforecast', 'ray', 'pytorch_lightning'} & sys.modules.keys())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"
