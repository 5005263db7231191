"""Records of trainings: the names of their files, which decide whether a training runs again."""

import math
from dataclasses import asdict

import numpy as np
import pytest

pytest.importorskip("transformers", reason="needs free-energy-mixer[lm]")

from fem_research.common.grid import keep, record_of, smallest
from fem_research.forecast.series import Series
from fem_research.forecast.settings import ForecastRecipe
from fem_research.forecast.settings import Job as ForecastJob
from fem_research.lm import ablate
from fem_research.lm.settings import row_fields
from fem_research.mad.experiment import MADRecipe
from fem_research.regimes.settings import RegimesRecipe
from fem_research.vision import settings
from fem_research.vision.settings import VisionRecipe

SERIES = Series("x", ("a",), np.arange(40.0).reshape(20, 2), {})


def ablation() -> str:
    language = ablate.AblateRecipe().language(0.001, 0)
    return ablate.Job(row="full", mixer=row_fields("full", "softmax"), language=language, text="x").key


KEYS = {
    "mad": lambda: MADRecipe().jobs()[0].key,
    "regimes": lambda: RegimesRecipe().job("peak", "softmax", 0.003, 0).key,
    "forecast": lambda: ForecastJob(SERIES, 4, 0, "none", ForecastRecipe()).key,
    "vision": lambda: next(VisionRecipe().jobs()).key,
    "ablate": ablation,
}


@pytest.mark.parametrize(
    "experiment, key",
    [
        ("mad", "compression-softmax-seed0-42360f0b8f91"),
        ("regimes", "peak-softmax-seed0-4b72b7787282"),
        ("forecast", "x-4-none-seed0-29f40ef8ac8a"),
        ("vision", "softmax-seed0-5c232b785f17"),
        ("ablate", "full-lr0.001-seed0-166c96d68789"),
    ],
)
def test_records_of_earlier_versions_are_found_again(experiment, key):
    """A new field must leave the names as they are where it has its default: else all trainings run again."""
    assert KEYS[experiment]() == key


def test_a_record_counts_for_the_job_that_it_names(tmp_path):
    job, other = MADRecipe().jobs()[:2]
    for named, found in ((job, True), (other, False)):
        keep(job, tmp_path, {"job": asdict(named), "curve": []})
        assert (record_of(job, tmp_path) is not None) == found


@pytest.mark.parametrize("torn", ["[]", "{}", '{"job": {"mixer"', "\0" * 40])
def test_a_damaged_record_counts_for_none_and_is_told(tmp_path, capsys, torn):
    job = MADRecipe().jobs()[0]
    (tmp_path / f"{job.key}.json").write_text(torn)
    assert record_of(job, tmp_path) is None
    assert f"{job.key}.json is damaged; its training runs again" in capsys.readouterr().err


def test_other_files_in_a_folder_of_pictures_are_another_training(tmp_path):
    keys = set()
    for number, content in enumerate((b"one", b"other")):
        (tmp_path / str(number)).mkdir()
        (tmp_path / "data").unlink(missing_ok=True)
        (tmp_path / "data").symlink_to(tmp_path / str(number))
        (tmp_path / str(number) / "a.png").write_bytes(content)
        settings._files.cache_clear()
        keys.add(VisionRecipe(data=str(tmp_path / "data")).key)
    assert len(keys) == 2


def test_a_training_that_diverged_is_at_no_best_rate():
    assert smallest({1e20: math.nan, 0.003: 0.08, 0.01: -math.inf}) == 0.003
