"""Series for forecasting: what is read, how it is split and scaled, what is refused."""

import gzip
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from waves import command, ett, waves

from fem_research.forecast import training
from fem_research.forecast.series import ETT_CHANNELS, Series, _splits, load_series, windows
from fem_research.forecast.settings import BASELINES, PROFILES, ForecastRecipe, Job


@pytest.fixture
def csv(tmp_path):
    path = tmp_path / "waves.csv"
    waves(300).to_csv(path, index=False)
    return path


@pytest.mark.parametrize(
    "name, table, splits",
    [
        ("ETTh1", ett(14403), {"train": (0, 8640), "validation": (8640, 11520), "test": (11520, 14400)}),
        ("weather", waves(59, 21), {"train": (0, 41), "validation": (41, 48), "test": (48, 59)}),
        ("solar_AL", waves(59, 137), {"train": (0, 41), "validation": (41, 46), "test": (48, 59)}),
        ("other", waves(59), {"train": (0, 41), "validation": (41, 48), "test": (48, 59)}),
    ],
)
def test_each_dataset_has_its_standard_split(tmp_path, name, table, splits):
    table.to_csv(tmp_path / f"{name}.csv", index=False)
    assert load_series(tmp_path / f"{name}.csv").splits == splits


def test_ettm_has_four_times_the_rows_of_etth(tmp_path):
    ett(57600).to_csv(tmp_path / "ETTm1.csv", index=False)
    assert load_series(tmp_path / "ETTm1.csv").splits["test"] == (46080, 57600)


def test_a_compressed_file_is_the_file(csv):
    packed = csv.with_name("waves.csv.gz")
    packed.write_bytes(gzip.compress(csv.read_bytes()))
    assert np.array_equal(load_series(packed).values, load_series(csv).values)
    assert load_series(packed).name == load_series(csv).name == "waves"


def test_solar_may_be_numbers_alone(tmp_path):
    table = waves(59, 137).drop(columns="date")
    table.to_csv(tmp_path / "solar_AL.txt", index=False, header=False)
    series = load_series(tmp_path / "solar_AL.txt")
    assert np.allclose(series.values, table.to_numpy())
    assert series.name == "solar"  # the row of Table 4


def test_columns_may_be_called_by_numbers(tmp_path):
    table = waves(59, 3).set_axis(["date", "0", "1", "OT"], axis=1)
    table.to_csv(tmp_path / "electricity.csv", index=False)
    assert load_series(tmp_path / "electricity.csv").channels == ("0", "1", "OT")


def test_the_gaps_of_the_usual_weather_file_are_taken_as_even(tmp_path):
    waves(60, 21).drop(index=30).to_csv(tmp_path / "weather.csv", index=False)
    assert len(load_series(tmp_path / "weather.csv").values) == 59


def test_scaling_takes_the_training_rows_alone(csv):
    series = load_series(csv)
    train = series.values[:210]
    wanted = np.empty_like(series.values)
    for channel in range(2):
        mean = sum(train[:, channel]) / 210
        deviation = (sum((train[:, channel] - mean) ** 2) / 210) ** 0.5
        wanted[:, channel] = (series.values[:, channel] - mean) / deviation
    assert np.allclose(series.scaled(), wanted, atol=1e-5)
    later = series.values.copy()
    later[210:] *= 7
    assert torch.equal(replace(series, values=later).scaled()[:210], series.scaled()[:210])


def test_a_constant_channel_is_scaled_to_zero():
    series = Series("flat", ("c",), np.full((30, 1), 3.0), {"train": (0, 21), "validation": (21, 24), "test": (24, 30)})
    assert torch.equal(series.scaled(), torch.zeros(30, 1))


def test_every_window_of_a_split_is_there_once_and_its_future_lies_inside(csv):
    series, lookback, horizon = load_series(csv), 17, 5
    rows = series.scaled()
    for split, found in windows(series, lookback, horizon).items():
        start, stop = series.splits[split]
        first = start + (lookback if split == "train" else 0)
        assert len(found) == stop - horizon - first + 1
        history, future = found.take(torch.arange(len(found)))
        for number in range(len(found)):
            now = first + number
            assert torch.equal(history[number], rows[now - lookback : now])
            assert torch.equal(future[number], rows[now : now + horizon])


BAD = {
    "a missing column": (ett(100).drop(columns="HULL"), "ETTh1.csv", "ETTh1 has no column HULL; its columns are"),
    "no dates": (waves(99).drop(columns="date"), "mine.csv", "mine has no column date"),
    "too few channels": (waves(99, 5), "weather.csv", "weather must have 21 channels, got 5."),
    "a gap": (
        waves(99).drop(index=40),
        "mine.csv",
        "mine.csv has a gap in its dates: 2020-01-02 17:00:00 follows 2020-01-02 15:00:00, where rows are 0 days "
        "01:00:00 apart",
    ),
    "a date that is none": (waves(99).astype({"date": str}).replace({"2020-01-01 03:00:00": "x"}), "mine.csv", "'x'"),
    "an empty cell": (waves(99).replace({"c1": {waves(99)["c1"][7]: np.nan}}), "mine.csv", "nan in column c1, row 8"),
    "a word": (waves(99).astype({"c0": str}).assign(c0="high"), "mine.csv", "mine.csv has high in column c0, row 1"),
    "too few rows for the split": (ett(500), "ETTh1.csv", "its standard split needs 14400 rows, got 500."),
    "no rows": (waves(20)[:0], "mine.csv", "mine is too short: its train rows [0, 0) hold no window"),
    "too few rows for a window": (waves(20), "mine.csv", "mine is too short: its train rows [0, 14) hold no window"),
}


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("case", BAD)
def test_bad_data_is_one_sentence_before_any_training(monkeypatch, tmp_path, capsys, case):
    table, name, sentence = BAD[case]
    table.to_csv(tmp_path / name, index=False)
    monkeypatch.setattr(training, "train", lambda *_: pytest.fail("training has started"))
    options = ["--lookback", 24, "--horizon", 5, "--output", tmp_path / "out"]
    assert command(monkeypatch, "--data", tmp_path / name, *options) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_two_files_of_one_name_are_refused(monkeypatch, tmp_path, capsys):
    """Else a table would show the mean of both as one."""
    for folder in "ab":
        (tmp_path / folder).mkdir()
        waves(99).to_csv(tmp_path / folder / "mine.csv", index=False)
    assert command(monkeypatch, "--data", f"{tmp_path}/a/mine.csv,{tmp_path}/b/mine.csv", "--lookback", 24) == 2
    assert "--data must be files of different names, got 'mine' twice; rename one." in capsys.readouterr().err


DATA = Path(os.environ.get("FEM_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"))


@pytest.mark.parametrize("name, test", [("ETTh1", (11520, 14400)), ("ETTm1", (46080, 57600))])
def test_the_usual_files_are_read(name, test):
    path = DATA / "ett" / f"{name}.csv.gz"
    if not path.exists():
        pytest.skip(f"no data at {path}; set FEM_DATA to the folder that holds ett/{name}.csv.gz")
    series = load_series(path)
    assert series.splits["test"] == test
    assert series.channels == ETT_CHANNELS
    assert len(windows(series, 512, 96)["test"]) == test[1] - test[0] - 95


def test_the_page_of_the_paper_counts_the_steps_of_table_4():
    recipe = ForecastRecipe(**PROFILES["paper"], data="made up")
    sizes = {"weather": (52_696, 21), "solar": (52_560, 137)}
    sizes |= dict.fromkeys(("ETTh1", "ETTh2"), (14_400, 7)) | dict.fromkeys(("ETTm1", "ETTm2"), (57_600, 7))
    steps = 0
    for name, (rows, channels) in sizes.items():
        splits = _splits(name, name.lower().rstrip("12"), rows)
        series = Series(name, tuple(map(str, range(channels))), np.zeros((rows, channels)), splits)
        for horizon in recipe.horizons:
            job = Job(series, horizon, 0, "softmax", recipe)
            batches = -(-len(job.windows(job.lookback)["train"]) // job.batch)
            steps += batches * recipe.epochs * sum(model not in BASELINES for model in recipe.model_names)
    page = (Path(__file__).parents[2] / "docs" / "paper.md").read_text(encoding="utf-8")
    assert f"the backbone's at most {steps / 1e6:.0f}M steps" in page
