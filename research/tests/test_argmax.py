"""Appendix P: the argmax task, its two readers and the run that compares them."""

import csv
import json
from dataclasses import replace
from importlib.metadata import version

import pytest
import torch

from fem_research.argmax import experiment as argmax
from fem_research.argmax.experiment import ArgmaxRecipe, Reader, draw
from fem_research.argmax.settings import PAPER

TINY = ArgmaxRecipe(
    tokens=7,
    channels=6,
    heads=2,
    train_examples=40,
    validation_examples=11,
    test_examples=9,
    batch=5,
    steps=8,
    eval_every=4,
    seeds=2,
)
CPU = torch.device("cpu")


@pytest.mark.parametrize("split", argmax.SPLITS)
def test_the_papers_winner_is_the_largest_value_of_its_channel(split):
    examples = draw(ArgmaxRecipe(form="paper"), split, 0, 64)
    assert examples.values.shape == (64, 64, 64)
    torch.testing.assert_close(examples.values.argmax(1), examples.winner)
    losers = examples.values.scatter(1, examples.winner[:, None], 0.0)
    assert losers.std().item() == pytest.approx(0.05, rel=0.02)
    assert (examples.target.mean().item(), examples.target.std().item()) == pytest.approx((1.0, 0.05), rel=0.05)
    counts = examples.winner.flatten().bincount(minlength=64).float()
    assert counts.min() > 20
    assert counts.max() < 120


def test_winners_spread_as_wide_as_losers_and_so_does_their_distance_from_the_mean():
    examples = draw(ArgmaxRecipe(), "test", 0, 256)
    assert examples.values.dtype == torch.float32
    torch.testing.assert_close(examples.values.argmax(1), examples.winner)
    assert examples.target.std() > examples.values.std()
    distance = examples.target - examples.values.mean(1)
    assert distance.std() > 0.5 * distance.mean()


def test_the_constant_1_wins_the_papers_form_and_nothing_that_reads_no_token_wins_the_other():
    constant = lambda values: values.new_ones(len(values), values.shape[-1])  # noqa: E731
    paper = argmax.evaluate(constant, ArgmaxRecipe(form="paper", test_examples=64), "test", CPU)
    assert paper["index_accuracy"] == paper["hits"] == 1
    assert paper["mse"] < 0.003
    spread = argmax.baselines(ArgmaxRecipe(test_examples=256))
    assert max(score["hits"] for score in spread.values()) < 0.3
    assert min(score["error"] for score in spread.values()) > 0.4
    assert spread["the best constant"]["error"] == pytest.approx(1, abs=1e-2)
    hundred = argmax.evaluate(lambda values: 100 * constant(values), ArgmaxRecipe(test_examples=64), "test", CPU)
    assert (hundred["index_accuracy"], hundred["hits"]) == (1, 0)


def test_a_batch_is_the_same_at_every_draw_and_no_other_is_like_it():
    before = torch.get_rng_state()
    first = draw(TINY, "train", 3, 5)
    torch.testing.assert_close(first, draw(TINY, "train", 3, 5), rtol=0, atol=0)
    others = [
        draw(TINY, "train", 4, 5),
        draw(TINY, "validation", 3, 5),
        draw(replace(TINY, seed=1), "train", 3, 5),
        draw(TINY, "test", 3, 5),
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
        width = len(q) // 2
        for j in range(6):
            head = slice(width * (j // 3), width * (j // 3) + width)
            p = torch.softmax(torch.stack([q[head] @ k[i, head] / width**0.5 for i in range(5)]), 0)
            u = sum(p[i] * values[b, i, j] for i in range(5))
            if free_energy:
                beta = torch.log1p(torch.exp(reader.beta.theta.flatten()[j] + 1.8))
                lam = torch.sigmoid(reader.gate.inner(values[b, -1])[j])
                free = torch.log(sum(p[i] * torch.exp(beta * values[b, i, j]) for i in range(5))) / beta
                u = (1 - lam) * u + lam * free
            assert found[b, j].item() == pytest.approx(u.item(), abs=1e-9)


@pytest.mark.parametrize(("channels", "heads"), [(32, 4), (64, 4), (512, 4)])
def test_both_readers_have_the_same_parameters(channels, heads):
    fem, softmax = (
        sum(p.numel() for p in Reader(channels, heads, free_energy).parameters()) for free_energy in (True, False)
    )
    assert softmax == pytest.approx(fem, rel=0.03)


def test_the_paper_flag_is_appendix_p():
    recipe = ArgmaxRecipe(**PAPER)
    assert (recipe.form, recipe.tokens, recipe.channels, recipe.heads) == ("paper", 128, 512, 4)
    assert (recipe.train_examples, recipe.validation_examples) == (200_000, 2_000)
    assert (recipe.batch, recipe.learning_rate, recipe.steps, recipe.seed) == (64, 1e-2, 2_000, 42)
    assert recipe.enough > 1
    fem, softmax = (Reader(6, 2, free_energy, recipe.same) for free_energy in (True, False))
    assert fem.query.weight.shape == softmax.query.weight.shape == (6, 6)


def test_appendix_p_of_toy_size_draws_figure_3(tmp_path, monkeypatch):
    small = {"tokens": 8, "channels": 8, "train_examples": 640, "validation_examples": 64, "test_examples": 64}
    recipe = ArgmaxRecipe(**PAPER | small | {"steps": 200, "heads": 2})
    drawn = []
    monkeypatch.setattr(argmax.pictures, "curves", lambda *given: drawn.append(given))
    results = argmax.run(recipe, tmp_path / "run")
    assert [len(results["curves"][name][0]) for name in ("fem", "softmax")] == [3, 3]
    ((_, _, curves, panels),) = drawn
    assert [(x, y) for _, _, x, y in panels] == [("step", "mse"), ("step", "index_accuracy")]
    assert all(y in curves["fem"][0][0] for *_, y in panels)
    assert results["argmax"]["fem"]["mse"] < results["argmax"]["softmax"]["mse"]
    page = (tmp_path / "run" / "report.md").read_text()
    assert "Every reader takes all steps." in page
    assert "--form paper --same prior" in page


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
    second = values.scatter(1, winner[:, None], -torch.inf).amax(1)
    near = (prediction - values.amax(1)).abs() <= (values.amax(1) - second) / 2
    score = argmax.evaluate(reader, TINY, "validation", CPU)
    assert score["mse"] == pytest.approx((prediction - values.amax(1)).square().mean().item(), rel=1e-5)
    assert score["error"] == pytest.approx(score["mse"] / values.amax(1).var(correction=0).item(), rel=1e-5)
    assert score["index_accuracy"] == pytest.approx((nearest == winner).float().mean().item(), abs=1e-6)
    assert score["hits"] == pytest.approx(near.float().mean().item(), abs=1e-6)


def test_a_reader_that_is_good_enough_stops():
    (score,) = argmax.train(replace(TINY, enough=0.0), True, CPU)
    assert score["step"] == 0
    assert {f"test_{metric}" for metric in argmax.METRICS} <= score.keys()


def test_a_run_scores_the_untrained_predictors_once(tmp_path, monkeypatch):
    scored, evaluate = [], argmax.evaluate
    monkeypatch.setattr(argmax, "evaluate", lambda what, *rest: (scored.append(what), evaluate(what, *rest))[1])
    argmax.run(replace(TINY, steps=1, seeds=1), tmp_path / "run")
    assert len([what for what in scored if not isinstance(what, argmax.Reader)]) == 3


def test_a_run_writes_its_recipe_scores_table_and_plot(tmp_path):
    results = argmax.run(TINY, tmp_path / "runs" / "argmax")
    folder = tmp_path / "runs" / "argmax"
    assert json.loads((folder / "results.json").read_text()) == results
    for reader in ("fem", "softmax"):
        assert {metric: len(seeds) for metric, seeds in results["argmax"][reader].items()} == {
            "mse": 2,
            "error": 2,
            "index_accuracy": 2,
            "hits": 2,
            "steps": 2,
        }
    assert results["seed"] == 0
    assert results["versions"]["torch"] == version("torch")
    config = json.loads((folder / "config.json").read_text())
    assert config["recipe"]["tokens"] == 7
    assert config["hardware"]["cores"] >= 1
    assert config["date"]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [(line["model"], line["seed"], line["step"]) for line in lines] == [
        (model, seed, step) for seed in (0, 1) for model in ("fem", "softmax") for step in (0, 4, 8)
    ]
    with open(folder / "table.csv", newline="") as file:
        assert [row["read"] for row in csv.DictReader(file)] == ["FEM", "attention", *results["baselines"]]
    assert (folder / "argmax.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["argmax"]


@pytest.mark.slow
def test_fem_finds_the_winners_and_softmax_fewer_than_a_mean_with_a_constant():
    recipe = ArgmaxRecipe(tokens=32, channels=32, steps=1500, test_examples=256, validation_examples=256)
    fem, softmax = (list(argmax.train(recipe, free_energy, CPU))[-1] for free_energy in (True, False))
    floor = argmax.baselines(recipe)["its mean and the best constant"]
    assert fem["test_hits"] > 0.5 > floor["hits"] > softmax["test_hits"]
    assert fem["test_error"] < 0.1
    assert softmax["test_error"] > floor["error"]
