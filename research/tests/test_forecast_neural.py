"""`FEMForecaster` in neuralforecast, and neuralforecast's own models on our windows."""

import logging
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import torch

from fem_research.forecast.series import Series
from fem_research.forecast.settings import BASELINES, ForecastRecipe, Job
from fem_research.runs.run import progress

pytest.importorskip("neuralforecast", reason="needs neuralforecast: pip install 'free-energy-mixer[forecast]'")

from neuralforecast import NeuralForecast
from neuralforecast.losses.pytorch import MSE, DistributionLoss, MQLoss

from fem.models import FEMForecaster
from fem_research.forecast import baselines
from fem_research.forecast.baselines import MODELS, QUIET, forecast, long_table, train_baseline

ROWS = np.stack([np.sin(np.arange(150) / 4), np.cos(np.arange(150) / 7) + 3], 1).astype(np.float32)
SMALL = {"h": 5, "input_size": 23, "hidden_size": 16, "n_heads": 2, "n_layers": 1, "patch_len": 4, "max_steps": 3}
SMALL |= {"accelerator": "cpu", **QUIET}


def fitted(**fields):
    forecaster = NeuralForecast(models=[FEMForecaster(**SMALL | fields)], freq=1)
    forecaster.fit(long_table(ROWS))
    return forecaster


def batch(x, mask=None):
    return {"insample_y": x[..., None], "insample_mask": None if mask is None else mask[..., None]}


@pytest.mark.parametrize("prior_type", ["softmax", pytest.param("mamba", marks=pytest.mark.slow)])
def test_cross_validation_is_our_windows_and_metric(prior_type):
    forecaster = NeuralForecast(models=[FEMForecaster(**SMALL, prior_type=prior_type, loss=MSE())], freq=1)
    table = forecaster.cross_validation(long_table(ROWS), val_size=20, test_size=20, n_windows=None, step_size=1)
    assert table["cutoff"].nunique() == 16
    model = forecaster.models[0].eval()
    for cutoff, rows in table.groupby("cutoff"):
        history = torch.from_numpy(ROWS[cutoff - 22 : cutoff + 1])
        wanted = rows["FEMForecaster"].to_numpy().reshape(2, 5).T
        assert np.allclose(forecast(model, history[None])[0].detach(), wanted, atol=1e-5)


def test_a_saved_forecaster_forecasts_the_same(tmp_path):
    before = fitted(mixer={"use_conv": False}, prior_type="gla")
    before.save(str(tmp_path), overwrite=True)
    after = NeuralForecast.load(str(tmp_path))
    assert isinstance(after.models[0], FEMForecaster)
    assert after.models[0].blocks[0].mixer.config == before.models[0].blocks[0].mixer.config
    assert np.array_equal(after.predict()["FEMForecaster"], before.predict()["FEMForecaster"])


def with_exogenous(series=2, seed=0):
    """Daily series with a column of the history, one whose future is known, and one of the series."""
    table = long_table(np.random.default_rng(seed).standard_normal((60, series)).astype(np.float32))
    table["past"], table["known"] = np.random.default_rng(seed + 1).standard_normal((2, len(table)))
    return table, pd.DataFrame({"unique_id": table["unique_id"].unique(), "size": np.arange(series) + 1.0})


EXOGENOUS = {"hist_exog_list": ["past"], "futr_exog_list": ["known"], "stat_exog_list": ["size"]}


def test_every_exogenous_input_reaches_the_forecast():
    table, static = with_exogenous()
    rows, future = table[table["ds"] < 55], table[table["ds"] >= 55].drop(columns=["y", "past"])
    forecaster = NeuralForecast(models=[FEMForecaster(**SMALL | EXOGENOUS)], freq=1)
    forecaster.fit(rows, static_df=static)
    given = {"df": rows, "static_df": static, "futr_df": future}
    before = forecaster.predict(**given)["FEMForecaster"]
    places = [("df", "past"), ("df", "known"), ("futr_df", "known"), ("static_df", "size"), ("df", "y")]
    for name, column in places:
        changed = given[name].copy()
        recent = changed["ds"] >= 50 if "ds" in changed else slice(None)
        changed.loc[recent, column] += 1.0
        after = forecaster.predict(**given | {name: changed})["FEMForecaster"]
        assert not np.allclose(before, after), (name, column)


@pytest.mark.slow
def test_a_forecaster_with_exogenous_inputs_is_loaded_in_a_fresh_process(tmp_path):
    table, static = with_exogenous()
    rows, future = table[table["ds"] < 55], table[table["ds"] >= 55].drop(columns=["y", "past"])
    forecaster = NeuralForecast(models=[FEMForecaster(**SMALL | EXOGENOUS)], freq=1)
    forecaster.fit(rows, static_df=static)
    forecaster.save(str(tmp_path / "saved"), overwrite=True)
    future.to_csv(tmp_path / "future.csv", index=False)
    program = (
        "import sys, pandas, neuralforecast, fem; folder = sys.argv[1]\n"
        "future = pandas.read_csv(f'{folder}/future.csv', dtype={'unique_id': str})\n"
        "table = neuralforecast.NeuralForecast.load(f'{folder}/saved').predict(futr_df=future)\n"
        "table.to_csv(f'{folder}/found.csv', index=False)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True)
    found = pd.read_csv(tmp_path / "found.csv")["FEMForecaster"]
    assert np.allclose(found, forecaster.predict(futr_df=future)["FEMForecaster"], atol=1e-6)


def test_quantiles_and_distributions_have_their_columns():
    shown = fitted(loss=MQLoss(level=[80])).predict().columns
    assert {"FEMForecaster-median", "FEMForecaster-lo-80", "FEMForecaster-hi-80"} <= set(shown)
    assert "FEMForecaster-lo-80" in fitted(loss=DistributionLoss("Normal", level=[80])).predict()


def test_a_forecast_without_the_history_of_y_has_its_units():
    rows = np.arange(120)
    table = pd.DataFrame({"unique_id": "0", "ds": rows, "y": 100 + 10 * np.sin(rows / 5), "known": np.sin(rows / 5)})
    given = {"futr_exog_list": ["known"], "exclude_insample_y": True, "max_steps": 60, "learning_rate": 3e-3}
    forecaster = NeuralForecast(models=[FEMForecaster(**SMALL | given)], freq=1)
    forecaster.fit(table[:-5])
    found = forecaster.predict(futr_df=table[-5:].drop(columns="y"))["FEMForecaster"]
    assert np.abs(found.to_numpy() - table["y"].to_numpy()[-5:]).max() < 5


def test_quantile_loss_learns_an_interval():
    noise = np.random.default_rng(0).standard_normal((300, 1)).astype(np.float32)
    model = FEMForecaster(**SMALL | {"max_steps": 60}, loss=MQLoss(level=[80]), learning_rate=3e-3)
    forecaster = NeuralForecast(models=[model], freq=1)
    forecaster.fit(long_table(noise))
    interval = forecaster.predict()
    width = interval["FEMForecaster-hi-80"] - interval["FEMForecaster-lo-80"]
    assert (width > 1.0).all()
    assert (width < 5.0).all()


@pytest.mark.parametrize("loss, outputs", [(None, 1), (MQLoss(level=[80]), 3)])
@pytest.mark.parametrize("unit, level", [(300, -70), (1e-6, 0), (1, 1e4)])
def test_forecasts_follow_the_units_of_the_data(loss, outputs, unit, level):
    model = FEMForecaster(**SMALL, loss=loss).double().eval()
    y = torch.randn(4, 23, dtype=torch.float64)
    one, other = model(batch(y)), model(batch(unit * y + level))
    assert one.shape == (4, 5, outputs)
    torch.testing.assert_close((other - level) / unit, one, rtol=1e-5, atol=1e-5)


def test_a_window_that_stands_still_is_forecast_as_it_stands_and_its_gradient_is_small():
    model = FEMForecaster(**SMALL, loss=MSE()).eval()
    still = torch.full((2, 23), 7.0)
    said = model(batch(still))
    torch.testing.assert_close(said, torch.full_like(said, 7.0), rtol=0, atol=1e-3)
    (said - 8).square().mean().backward()
    assert all(part.grad.isfinite().all() and part.grad.abs().max() < 1e-3 for part in model.parameters())


def test_a_known_future_of_a_column_that_stood_still_is_told_by_its_size():
    model = FEMForecaster(**SMALL | {"futr_exog_list": ["known"]}).eval()
    inputs = []
    model.future.register_forward_pre_hook(lambda part, args: inputs.append(args[0]))
    for value, change in ((0.0, 1.0), (0.0, 3.0), (40.0, 2.0), (1e6, -1e5)):
        known = torch.full((1, 23 + 5, 1), value)
        known[:, 23:] += change
        model(batch(torch.randn(1, 23)) | {"futr_exog": known})
    seen = [x.flatten()[x.flatten().nonzero()[0]].item() for x in inputs]
    assert seen == pytest.approx([1.0, 3.0, 0.05, -0.1])


def test_rows_before_the_start_are_no_rows():
    model = FEMForecaster(**SMALL).eval()
    x, mask = torch.randn(2, 23), torch.ones(2, 23)
    mask[:, :12] = 0
    other = torch.where(mask > 0, x, 1e3)
    forecasts = model(batch(x, mask))
    assert torch.equal(forecasts, model(batch(other, mask)))
    assert torch.equal(forecasts, model(batch(torch.where(mask > 0, x, torch.nan), mask)))
    assert torch.equal(model(batch(x)), model(batch(x, torch.ones(2, 23))))
    assert not torch.equal(model(batch(x)), forecasts)
    with torch.no_grad():
        model.position[:3] += 1  # of the patches that end before row 12
    assert torch.equal(model(batch(x, mask)), forecasts)


def test_short_series_are_forecast_with_padding():
    model = FEMForecaster(**SMALL, start_padding_enabled=True)
    forecaster = NeuralForecast(models=[model], freq=1)
    forecaster.fit(long_table(ROWS[:15]))
    assert forecaster.predict()["FEMForecaster"].notna().all()


def test_bad_sizes_are_one_sentence():
    with pytest.raises(ValueError, match=r"patch_len must be positive, got 0\."):
        FEMForecaster(**SMALL | {"patch_len": 0})
    with pytest.raises(TypeError, match="did you mean 'use_conv'"):
        FEMForecaster(**SMALL, mixer={"use_convv": False})
    with pytest.raises(ValueError, match="prior_type must be one of"):
        FEMForecaster(**SMALL, prior_type="lstm")


@pytest.mark.parametrize(
    "model", [BASELINES[0], *(pytest.param(name, marks=pytest.mark.slow) for name in BASELINES[1:])]
)
def test_every_baseline_trains_on_train_rows_and_is_tested_on_all_windows(model, caplog):
    for library in ("pytorch_lightning", "lightning_fabric"):  # as in a fresh process
        logging.getLogger(library).setLevel(logging.INFO)
    assert MODELS.keys() == set(BASELINES)
    splits = {"train": (0, 100), "validation": (100, 120), "test": (120, 150)}
    series = Series("waves", ("a", "b"), ROWS.astype(np.float64), splits)
    recipe = ForecastRecipe(peer_lookback="23", peer_steps=4)

    def error(rows):
        with progress() as bars:
            return train_baseline(Job(Series("waves", ("a", "b"), rows, splits), 5, 0, model, recipe), bars)

    found = error(series.values)
    assert not caplog.records  # a word between would break the bars of a terminal
    assert found["mse"] > 0
    assert [len(part) for part in found["example"].values()] == [10, 5, 5]
    assert found["curve"][-1]["step"] == 4
    changed = series.values.copy()
    changed[140:] = changed[130:140]  # no row that a model may train on
    assert error(changed)["curve"] == found["curve"]


def test_of_several_lookbacks_the_best_on_the_validation_rows_is_tested(monkeypatch):
    splits = {"train": (0, 100), "validation": (100, 120), "test": (120, 150)}
    series = Series("waves", ("a", "b"), ROWS.astype(np.float64), splits)

    def tested(lookbacks):
        job = Job(series, 5, 0, "dlinear", ForecastRecipe(peer_lookback=lookbacks, peer_steps=4))
        with progress() as bars:
            return train_baseline(job, bars) | {"seconds": 0}

    errors = {12: 3.0, 23: 1.0, 17: 2.0}
    alone, real = tested("23"), baselines.score

    def scripted(predict, windows):
        validation = len(windows.rows) - windows.lookback == 20
        return real(predict, windows)._replace(mse=errors[windows.lookback]) if validation else real(predict, windows)

    monkeypatch.setattr(baselines, "score", scripted)
    assert tested("12,23,17") == alone
    assert alone["lookback"] == 23
