"""Appendix P: the argmax task, its two readers and the run that compares them."""

import csv
import json
from dataclasses import replace

import pytest
import torch

from fem.experiments import argmax
from fem.experiments.argmax import ArgmaxRecipe, Reader, draw

TINY = ArgmaxRecipe(
    tokens=7, channels=6, heads=2, train_examples=40, validation_examples=11, batch=5, steps=8, eval_every=4
)
CPU = torch.device("cpu")


@pytest.mark.parametrize("split", argmax.SPLITS)
def test_the_winner_is_the_largest_value_of_its_channel(split):
    examples = draw(ArgmaxRecipe(), split, 0, 64)
    assert examples.values.shape == (64, 64, 64)
    torch.testing.assert_close(examples.values.argmax(1), examples.winner)
    losers = examples.values.scatter(1, examples.winner[:, None], 0.0)
    assert losers.std().item() == pytest.approx(0.05, rel=0.02)
    assert (examples.target.mean().item(), examples.target.std().item()) == pytest.approx((1.0, 0.05), rel=0.05)
    counts = examples.winner.flatten().bincount(minlength=64).float()
    assert counts.min() > 20
    assert counts.max() < 120


def test_a_batch_is_the_same_at_every_draw_and_no_other_is_like_it():
    before = torch.get_rng_state()
    first = draw(TINY, "train", 3, 5)
    torch.testing.assert_close(first, draw(TINY, "train", 3, 5), rtol=0, atol=0)
    others = [
        draw(TINY, "train", 4, 5),
        draw(TINY, "validation", 3, 5),
        draw(replace(TINY, seed=1), "train", 3, 5),
        draw(replace(TINY, seed=1), "validation", 3, 5),
    ]
    assert not any(torch.equal(first.values, other.values) for other in others)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("free_energy", [True, False])
def test_a_reader_is_its_equation(free_energy):
    """y_j = (1 - lambda_j) mean_j + lambda_j F_j over raw values, in loops."""
    torch.manual_seed(0)
    reader = Reader(6, 2, free_energy).double()
    with torch.no_grad():
        for parameter in reader.parameters():
            parameter.normal_()
    values = torch.randn(3, 5, 6, dtype=torch.float64)
    found = reader(values)
    for b in range(3):
        q, k = reader.query(values[b, -1]), reader.key(values[b])
        for j in range(6):
            head = slice(3 * (j // 3), 3 * (j // 3) + 3)
            p = torch.softmax(torch.stack([q[head] @ k[i, head] / 3**0.5 for i in range(5)]), 0)
            u = sum(p[i] * values[b, i, j] for i in range(5))
            if free_energy:
                beta = torch.log1p(torch.exp(reader.beta.theta.flatten()[j] + 1.8))
                lam = torch.sigmoid(reader.gate.inner(values[b, -1])[j])
                free = torch.log(sum(p[i] * torch.exp(beta * values[b, i, j]) for i in range(5))) / beta
                u = (1 - lam) * u + lam * free
            assert found[b, j].item() == pytest.approx(u.item(), abs=1e-9)


def test_both_readers_start_from_one_initialisation():
    fem, softmax = (Reader(8, 2, free_energy) for free_energy in (True, False))
    for reader in (fem, softmax):
        torch.manual_seed(3)
        reader.query.reset_parameters()
        reader.key.reset_parameters()
    torch.testing.assert_close(fem.query.weight, softmax.query.weight, rtol=0, atol=0)
    extra = {name for name, _ in fem.named_parameters()} - {name for name, _ in softmax.named_parameters()}
    assert extra == {"beta.theta", "gate.inner.weight", "gate.inner.bias"}


def test_the_same_seed_repeats_a_run_exactly():
    before = torch.get_rng_state()
    curves = [list(argmax.train(TINY, True, CPU)) for _ in range(2)]
    assert curves[0] == curves[1]
    assert [score["step"] for score in curves[0]] == [0, 4, 8]
    assert curves[0] != list(argmax.train(replace(TINY, seed=1), True, CPU))
    assert torch.equal(before, torch.get_rng_state())


def test_training_examples_come_again_once_all_were_seen(monkeypatch):
    seen = []
    monkeypatch.setattr(argmax, "draw", lambda *args: seen.append(args[1:3]) or draw(*args))
    list(argmax.train(replace(TINY, train_examples=17), False, CPU))
    assert [number for split, number in seen if split == "train"] == [0, 1, 2, 0, 1, 2, 0, 1]
    assert {number for split, number in seen if split == "validation"} == {0, 1, 2}


def test_validation_weighs_every_example_alike():
    """11 examples in batches of 5, 5 and 1 score as each example alone does, on average."""
    torch.manual_seed(1)
    reader = Reader(6, 2, True)
    batches = [draw(TINY, "validation", number, size) for number, size in enumerate((5, 5, 1))]
    values = torch.cat([batch.values for batch in batches])
    winner = torch.cat([batch.winner for batch in batches])
    prediction = reader(values)
    nearest = (values - prediction[:, None]).abs().argmin(1)
    score = argmax.validate(reader, TINY, CPU)
    assert score["mse"] == pytest.approx((prediction - values.amax(1)).square().mean().item(), rel=1e-5)
    assert score["index_accuracy"] == pytest.approx((nearest == winner).float().mean().item(), abs=1e-6)


def test_a_reader_that_is_good_enough_stops():
    assert [score["step"] for score in argmax.train(replace(TINY, enough=0.0), True, CPU)] == [0]


def test_a_run_writes_its_recipe_scores_table_and_plot(tmp_path):
    results = argmax.run(TINY, tmp_path / "runs" / "argmax")
    folder = tmp_path / "runs" / "argmax"
    assert json.loads((folder / "results.json").read_text()) == results
    assert {"mse", "index_accuracy"} <= results["fem"].keys() & results["softmax"].keys()
    assert results["seed"] == 0
    assert results["versions"]["torch"] == torch.__version__
    assert results["seconds"] > 0
    config = json.loads((folder / "config.json").read_text())
    assert config["recipe"]["tokens"] == 7
    assert config["hardware"]["cores"] >= 1
    assert config["date"]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [(line["model"], line["step"]) for line in lines] == [(m, s) for m in ("fem", "softmax") for s in (0, 4, 8)]
    with open(folder / "table.csv", newline="") as file:
        assert [row["read"] for row in csv.DictReader(file)] == ["fem", "softmax"]
    assert (folder / "argmax.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["argmax"]


@pytest.mark.parametrize(
    "field, value",
    [("steps", 0), ("tokens", -1), ("heads", 7), ("train_examples", 3), ("batch", 0), ("learning_rate", 0.0)],
)
def test_a_recipe_that_cannot_run_is_refused_by_name(field, value):
    with pytest.raises(ValueError, match=rf"{field}.*{value}"):
        replace(ArgmaxRecipe(batch=64), **{field: value})


@pytest.mark.slow
def test_fem_finds_99_percent_of_the_winners_and_softmax_at_most_10():
    fem, softmax = (list(argmax.train(argmax.SMALL, free_energy, CPU))[-1] for free_energy in (True, False))
    assert fem["index_accuracy"] >= 0.99
    assert softmax["index_accuracy"] <= 0.10
    assert fem["mse"] < 0.1 * softmax["mse"]
