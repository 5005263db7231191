"""`fem mad` without its data: names of mixers, models, one run, the sweep, and the table of results."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
import types
from dataclasses import asdict, replace
from unittest.mock import ANY

import numpy as np
import pytest
import torch

from fem import PRIORS, FreeEnergyMixerConfig
from fem_research.common.blocks import PUBLISHED
from fem_research.common.grid import place_of
from fem_research.common.mixers import canonical, fields_of, known
from fem_research.common.names import display
from fem_research.common.sweep import _run, sweep
from fem_research.mad import training
from fem_research.mad.experiment import (
    COLUMNS,
    TABLE1,
    MADRecipe,
    average,
    baseline_runs,
    best,
    mean_curve,
    readable,
    run,
    scored,
    steps_table,
    steps_to,
    summary,
    table1,
    task_scores,
    write_report,
)
from fem_research.mad.settings import PROFILES, Profile, Setting, Training
from fem_research.mad.training import (
    Data,
    Job,
    accuracies,
    accuracy_of_batch,
    build_backbone,
    evaluate,
    sinusoids,
    train,
)

TINY = Training(
    heads=2, batch=8, warmup=0.1, bfloat16=False, checkpoints=3, test_examples=12, width=16, blocks=2, mlp_width=32
)
MEMORIZE = Setting("memorization", {"vocab_size": 11, "seq_len": 8}, 16, 6)
COMPRESS = Setting("compression", {"vocab_size": 6, "seq_len": 5}, 20, 6)
MIXERS = sorted(
    {name for name, _ in TABLE1 if name not in PUBLISHED} | {canonical(f"{prior}+CLTG") for prior in PRIORS}
)


def job(**changes):
    defaults = {"mixer": "softmax", "setting": MEMORIZE, "initialisation": "normal", "learning_rate": 1e-2}
    return Job(**defaults | {"weight_decay": 0.0, "seed": 0, "training": TINY} | changes)


def record(mixer="softmax", task="memorization", score=0.5, seed=0, rate=1e-3, variant=0, initialisation="normal"):
    setting = Setting(task, {"variant": variant}, 8, 4)
    own = job(mixer=mixer, setting=setting, seed=seed, learning_rate=rate, initialisation=initialisation)
    points = [{"step": s, "micro": score * s / 4, "macro": score / 2, "test_loss": -s / 4} for s in (2, 4)]
    return {"job": asdict(own), "curve": points, "parameters": 7, "seconds": 1.0}


@pytest.mark.parametrize(
    ("name", "meaning"),
    [
        ("softmax", "softmax"),
        ("sm+GC", "softmax+CG"),
        ("fem-sm", "softmax+CLTG"),
        ("laser", "softmax+L"),
        ("aft", "rnn_softmax"),
        ("gla", "gla-norm"),
        ("gla+C", "gla+C-norm"),
        ("gla+CL", "gla+CL"),
        ("mamba", "mamba-norm"),
        ("fem-mamba-norm", "mamba+CLTG-norm"),
        ("fem-mamba_interactive", "mamba_interactive+CLTG"),
    ],
)
def test_a_name_says_prior_parts_and_normaliser(name, meaning):
    assert canonical(name) == canonical(meaning) == meaning


@pytest.mark.parametrize("name", ["", "hyena", "softmax+", "softmax+X", "softmax+T", "softmax-norm", "fem-"])
def test_a_name_without_meaning_is_one_sentence(name):
    with pytest.raises(ValueError, match=r"mixer must be|normalised by definition"):
        canonical(name)


def test_parts_switch_what_the_paper_calls_by_their_letters():
    config = FreeEnergyMixerConfig(n_embd=16, n_head=2, **fields_of("gla+CL"))
    assert (config.use_conv, config.use_lse, config.use_temperature, config.use_outer_gate) == (
        True,
        True,
        False,
        False,
    )
    assert config.normalize
    assert not FreeEnergyMixerConfig(n_embd=16, n_head=2, **fields_of("mamba-norm")).normalize


def test_the_papers_figures_average_to_the_papers_average():
    assert len(TABLE1) == 24
    for label, figures in TABLE1:
        printed = 76.2 if label == "gla+CLTG" else figures[6]  # the paper prints 74.9
        assert np.mean(figures[:6]) == pytest.approx(printed, abs=0.11), label


def test_the_paper_profile_is_mads_protocol():
    settings = [setting.task for setting in PROFILES["paper"].settings]
    wanted = {"compression": 11, "fuzzy-in-context-recall": 11, "in-context-recall": 11, "memorization": 6}
    wanted |= {"noisy-in-context-recall": 14, "selective-copying": 13}
    assert {task: settings.count(task) for task in settings} == wanted
    assert len(MADRecipe(profile="paper", mixers="softmax", seeds=1).jobs()) == 396
    steps = {(s.task, s.train_examples): s.steps for s in PROFILES["paper"].settings}
    assert steps["compression", 12800] == 20_000
    assert steps["compression", 800] == 1400
    assert steps["memorization", 256] == 400


@pytest.mark.parametrize("profile", PROFILES)
def test_all_mixers_have_the_parameters_of_softmax_attention(profile):
    sizes = {}
    for mixer in MIXERS:
        with torch.device("meta"):
            model = build_backbone("in-context-recall", 16, mixer, PROFILES[profile].training, "normal")
        sizes[mixer] = sum(parameter.numel() for parameter in model.parameters())
    assert sizes["softmax"] == sizes["linear"]
    for mixer, size in sizes.items():
        assert size == pytest.approx(sizes["softmax"], rel=2e-3), mixer


def test_a_kept_swiglu_is_352_wide_in_every_model():
    recipe = MADRecipe(profile="paper", mixers="FEM,attention", mlp="kept", seeds=1, tasks="memorization")
    job = recipe.jobs()[0]
    with torch.device("meta"):
        model = build_backbone("memorization", 16, job.mixer, job.training, "normal")
    assert [block.layer.up_proj.out_features for block in model.blocks[1::2]] == [352, 352]
    assert job.key != replace(recipe, mlp="narrowed").jobs()[0].key


@pytest.mark.parametrize("mixer", ["softmax", "softmax+CLTG", "gla+CLTG", "mamba+CLTG"])
def test_one_rule_starts_every_linear_map(mixer):
    sizes = replace(TINY, width=64, mlp_width=64)
    for rule, spread in (("normal", lambda inputs: 0.02), ("torch", lambda inputs: (3 * inputs) ** -0.5)):
        model = build_backbone("compression", 32, mixer, sizes, rule)
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear):
                inputs = module.in_features - getattr(module, "context", 0)
                start = 0 if inputs else 1e-12  # of value_scale, which has no other columns: DoRA divides by their norm
                assert (module.weight[:, inputs:].abs() <= start).all(), "the conditioner's columns start at 0"
                if inputs:
                    own = module.weight[:, :inputs]
                    noise = 4 / own.numel() ** 0.5
                    assert own.std().item() == pytest.approx(spread(inputs), rel=noise), name
                assert module.bias is None or not module.bias.any()


def test_a_published_mixer_keeps_its_biases_and_costs_the_backbone_its_size(monkeypatch):
    class DeltaNet(torch.nn.Module):
        def __init__(self, hidden_size, num_heads):
            super().__init__()
            self.project = torch.nn.Linear(hidden_size, 6 * hidden_size)
            torch.nn.init.constant_(self.project.bias, 0.7)
            self.num_heads = num_heads

        def forward(self, x):
            return self.project(x)[..., : x.shape[-1]], None, None

    layers = types.ModuleType("fla.layers")
    layers.DeltaNet = DeltaNet
    monkeypatch.setitem(sys.modules, "fla", types.ModuleType("fla"))
    monkeypatch.setitem(sys.modules, "fla.layers", layers)
    sizes = replace(TINY, width=64, heads=16, mlp_width=96)
    published, softmax = (
        build_backbone("memorization", 11, name, sizes, "normal") for name in ("fla:DeltaNet", "softmax")
    )
    own = [module for module in published.modules() if isinstance(module, DeltaNet)]
    assert len(own) == 2
    assert all((layer.project.bias == 0.7).all() and layer.num_heads == 2 for layer in own)
    assert own[0].project.weight.std().item() == pytest.approx(0.02, rel=0.05)
    count = lambda model: sum(parameter.numel() for parameter in model.parameters())  # noqa: E731
    assert count(published) == pytest.approx(count(softmax), rel=5e-3)
    assert published(torch.randint(11, (2, 8))).shape == (2, 8, 11)
    assert known("fla:DeltaNet") == "fla:DeltaNet"


def test_the_language_backbone_sees_no_future():
    model = build_backbone("memorization", 11, "softmax+CLTG", TINY, "torch")
    tokens = torch.randint(11, (2, 9))
    changed = tokens.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 11
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert (before[:, 5:] - after[:, 5:]).abs().max() > 1e-3


def test_the_auto_encoder_decodes_the_last_state_alone():
    model = build_backbone("compression", 11, "softmax", TINY, "torch")
    tokens = torch.randint(11, (2, 7))
    states = []
    model.blocks.register_forward_hook(lambda module, inputs, output: states.append(output))
    wanted = model(tokens)
    others = states[0].detach().clone()
    others[:, :-1] += torch.randn_like(others[:, :-1])
    model.blocks.register_forward_hook(lambda module, inputs, output: others)
    torch.testing.assert_close(model(tokens), wanted)
    assert (wanted[:, 0] - wanted[:, 1]).abs().max() > 1e-3, "positions differ"
    others[:, -1] += 1
    assert (model(tokens) - wanted).abs().max() > 1e-3


def test_position_vectors_tell_distances():
    vectors = sinusoids(12, torch.zeros(1, 6, dtype=torch.float64))
    products = vectors @ vectors.T
    for distance in range(6):
        along = products.diagonal(distance)
        torch.testing.assert_close(along, along[:1].expand_as(along))


def test_accuracies_count_targets_and_classes_of_targets():
    predictions, targets = torch.tensor([1, 1, 2, 5, 0, 3]), torch.tensor([1, 1, 2, 2, 4, 4])
    found = accuracies(predictions, targets)
    assert found == {"micro": pytest.approx(3 / 6), "macro": pytest.approx((1 + 0.5 + 0) / 3)}


def test_mads_own_accuracy_counts_classes_that_are_only_predicted():
    predictions, targets = torch.tensor([1, 1, 2, 5, 0, 3]), torch.tensor([1, 1, 2, 2, 4, 4])
    assert accuracy_of_batch(predictions, targets) == pytest.approx((1 + 0.5 + 0 + 0 + 0 + 0) / 6)  # of 1 2 4 and 0 3 5


def test_a_sweep_says_its_cost_before_it_starts():
    recipe = MADRecipe(profile="paper-one", mixers="FEM,attention", seeds=2, tasks="memorization,compression")
    assert recipe.cost() == "24 trainings, at most 244,800 steps and 1.0e+09 tokens"
    settings = [setting.task for setting in PROFILES["paper-one"].settings]
    assert sorted(settings) == sorted(COLUMNS)


@pytest.mark.parametrize("batch", [5, 12])
def test_test_results_are_those_of_one_loop_over_scored_tokens(batch):
    data = Data.of(MEMORIZE, TINY, 3, torch.device("cpu"))
    model = build_backbone("memorization", 11, "softmax", TINY, "torch").double()
    losses, hits, classes, by_row = [], [], {}, []
    with torch.no_grad():
        for row, wanted in zip(data.test_inputs, data.test_targets):
            by_row.append([])
            for logits, target in zip(model(row[None])[0], wanted.tolist()):
                if target >= 0:
                    losses.append(math.log(logits.exp().sum()) - logits[target].item())
                    hits.append(logits.argmax().item() == target)
                    classes.setdefault(target, []).append(hits[-1])
                    by_row[-1].append((logits.argmax().item(), target))
    own = []
    for first in range(0, len(by_row), batch):
        pairs = [pair for row in by_row[first : first + batch] for pair in row]
        shares = [
            [hit == c for hit, target in pairs if target == c] or [0] for c in {c for pair in pairs for c in pair}
        ]
        own.append(np.mean([np.mean(share) for share in shares]))
    found = evaluate(model, data, replace(TINY, batch=batch))
    macro = np.mean([np.mean(own) for own in classes.values()])
    wanted = {"test_loss": np.mean(losses), "micro": np.mean(hits), "macro": macro, "own": np.mean(own)}
    assert found == pytest.approx(wanted, abs=1e-5)


LONG = job(setting=replace(MEMORIZE, steps=90), mixer="softmax+CLTG")


@pytest.fixture(scope="module")
def learnt():
    torch.set_num_threads(1)
    return train(LONG, torch.device("cpu"))


def test_a_run_learns_and_is_the_same_again(learnt):
    curve = learnt["curve"]
    assert [point["step"] for point in curve] == [30, 60, 90]
    assert curve[-1]["micro"] > 0.95
    assert learnt["parameters"] > 1000
    short = replace(LONG, setting=replace(MEMORIZE, steps=9))
    assert train(short, torch.device("cpu")) == train(short, torch.device("cpu")) | {"seconds": ANY}
    others = job(setting=replace(MEMORIZE, steps=30), mixer="softmax+CLTG", seed=1)
    assert train(others, torch.device("cpu"))["curve"][-1] != curve[0]


@pytest.fixture
def saving_always(monkeypatch):
    """A checkpoint at every test, not once a minute."""
    monkeypatch.setattr(training, "MINUTE", 0.0)


@pytest.mark.parametrize("left", [2, 1], ids=["before the rename", "after it"])
def test_a_stopped_training_ends_as_one_that_was_not(tmp_path, monkeypatch, saving_always, left):
    """Killed while it writes the second of its three checkpoints, or just after: the same tests, digit by digit."""
    long = job(mixer="softmax+CLTG", setting=replace(MEMORIZE, steps=9))
    whole = train(long, torch.device("cpu"))
    original, renamed = os.replace, []

    def killed(source, target):
        second = "checkpoint" in os.path.basename(target) and renamed.append(target) is None and len(renamed) == 2
        if not second or left == 1:
            original(source, target)
        if second:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            train(long, torch.device("cpu"), tmp_path)
    tests = []
    monkeypatch.setattr(training, "evaluate", lambda *given: tests.append(given) or evaluate(*given))
    assert train(long, torch.device("cpu"), tmp_path) == whole | {"seconds": ANY}
    assert len(tests) == left


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_gone_on_from(tmp_path, monkeypatch, saving_always):
    long = job(setting=replace(MEMORIZE, steps=9))
    whole = train(long, torch.device("cpu"), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-6", "checkpoint-9"]
    tests = []
    monkeypatch.setattr(training, "evaluate", lambda *given: tests.append(given) or evaluate(*given))
    (tmp_path / "checkpoint-9" / "state.pt").write_bytes(b"PK cut of")
    with pytest.raises(ValueError, match="checkpoint-9' is damaged, or another version's; remove it to go on"):
        train(long, torch.device("cpu"), tmp_path)
    shutil.rmtree(tmp_path / "checkpoint-9")
    assert train(long, torch.device("cpu"), tmp_path) == whole | {"seconds": ANY}
    assert len(tests) == 1


def test_a_checkpoint_that_does_not_fit_is_refused_by_the_name_of_its_folder(tmp_path, saving_always):
    train(job(), torch.device("cpu"), tmp_path)
    with pytest.raises(ValueError, match=f"{tmp_path!s}/checkpoint-.* is damaged, or another version's"):
        train(job(mixer="softmax+G"), torch.device("cpu"), tmp_path)


def test_a_full_disk_is_one_sentence_and_the_checkpoint_before_stays(tmp_path, monkeypatch, saving_always):
    long = job(setting=replace(MEMORIZE, steps=9))
    save = torch.save

    def full(saved, path):
        if len(saved["curve"]) == 2:
            raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0")
        save(saved, path)

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match=r"checkpoint-6 could not be saved in .*: is the disk full\?"):
        train(long, torch.device("cpu"), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-3"]


def test_checkpoints_of_a_training_stay_until_its_record_is_written_and_nobody_else_writes_there(
    tmp_path, monkeypatch, saving_always
):
    own = job(setting=replace(MEMORIZE, steps=9))

    def full(*_):
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("fem_research.common.grid.write_json", full)
        with pytest.raises(OSError, match="No space left"):
            _run(train, own, "cpu", tmp_path)
    assert (tmp_path / own.key / "checkpoint-9").is_dir()
    _run(train, own, "cpu", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [f"{own.key}.json"]
    with place_of(own, tmp_path), pytest.raises(ValueError, match="another training writes to"):
        _run(train, own, "cpu", tmp_path)


def test_a_training_ends_when_enough_is_right(learnt):
    until = replace(TINY, enough=0.5)
    curve, whole = train(replace(LONG, training=until), torch.device("cpu"))["curve"], learnt["curve"]
    assert curve == whole[: len(curve)]
    assert len(curve) < len(whole)
    assert curve[-1]["micro"] >= 0.5
    assert all(point["micro"] < 0.5 for point in curve[:-1])
    assert replace(LONG, training=until).key != LONG.key


def test_a_diverged_run_has_all_its_tests_and_a_score():
    curve = train(job(learning_rate=1e30), torch.device("cpu"))["curve"]
    assert not math.isfinite(curve[-1]["test_loss"])
    assert len(curve) == TINY.checkpoints
    assert best(curve) in curve


def test_bfloat16_runs():
    curve = train(job(training=replace(TINY, bfloat16=True)), torch.device("cpu"))["curve"]
    assert math.isfinite(curve[-1]["test_loss"])


def test_the_best_test_is_the_one_of_lowest_perplexity():
    curve = [{"test_loss": 2.0, "micro": 0.9}, {"test_loss": 1.0, "micro": 0.5}, {"test_loss": math.nan, "micro": 1.0}]
    assert best(curve)["micro"] == 0.5
    assert best(curve[2:])["micro"] == 1.0


def test_steps_to_a_level_is_the_first_test_that_reaches_it():
    curve = [{"step": 10, "micro": 0.3}, {"step": 20, "micro": 0.9}, {"step": 30, "micro": 0.8}]
    assert steps_to(0.9, curve) == 20
    assert steps_to(0.95, curve) is None


def test_a_score_is_the_best_of_the_grid_averaged_over_settings():
    records = [
        record(score=score, rate=rate, variant=variant, seed=seed)
        for variant, grid in enumerate(((0.2, 0.6), (0.8, 0.4)))
        for rate, score in zip((1e-3, 1e-4), grid)
        for seed in (0, 1)
    ]
    assert task_scores(records, "final") == {"memorization": [pytest.approx(0.7)] * 2}
    assert task_scores(records, "mad_macro") == {"memorization": [pytest.approx(0.35)] * 2}
    assert task_scores(records, "mean") == {"memorization": [pytest.approx(0.525)] * 2}
    assert average(task_scores(records, "final")) is None


def test_the_table_has_the_papers_rows_ours_beside_them_and_blanks():
    tasks = [setting.task for setting in PROFILES["laptop"].settings]
    records = [record(task=task, score=0.1 * seed + 0.5, seed=seed) for task in tasks for seed in (0, 1, 2)]
    records += [record(mixer="softmax+G", task="memorization")]
    table = {row["model"]: row for row in table1(scored(records, "final"))}
    assert list(table)[: len(TABLE1)] == [display(name) for name, _ in TABLE1]
    ours = next(row for label, row in table.items() if label == "attention")
    assert (ours["Memorize"], ours["Memorize, paper"]) == (pytest.approx(60), 85.7)
    assert (ours["Avg"], ours["Avg, paper"], ours["Avg, sd over seeds"]) == (pytest.approx(60), 74.7, pytest.approx(10))
    assert ours["seeds"] == 3
    assert table["Hyena"]["Copy, paper"] == 93.0
    assert table["Hyena"]["Copy"] is None
    control = table["attention+G"]
    assert (control["Memorize"], control["Copy"], control["Avg"]) == (pytest.approx(50), None, None)
    assert control["Memorize, paper"] is None


def test_differences_are_those_of_equal_seeds_and_papers_figures_stand_beside_papers_sizes_alone():
    tasks = [setting.task for setting in PROFILES["laptop"].settings]
    scores = {"softmax": (0.2, 0.5, 0.8), "softmax+CG": (0.3, 0.6, 1.0)}
    records = [
        record(mixer=mixer, task=task, score=score, seed=seed)
        for mixer, seeds in scores.items()
        for task in tasks
        for seed, score in enumerate(seeds)
    ]
    table = table1(scored(records, "final"))
    laptop, paper = ({row["model"]: row for row in readable(table, brackets)} for brackets in (False, True))
    assert laptop["attention+CG"]["over its prior"] == "+13.3 ± 3.3"
    plain = next(label for label in laptop if label == "attention")
    assert laptop[plain]["over its prior"] == ""
    assert (laptop[plain]["Memorize"], paper[plain]["Memorize"]) == ("50.0", "50.0 (85.7)")
    assert paper["Hyena"]["Copy"] == "(93.0)"


def test_initialisations_have_rows_of_their_own():
    table = table1(scored([record(initialisation=rule) for rule in ("normal", "torch")], "final"))
    shown = [row["model"] for row in table if row["seeds"]]
    assert [name.rpartition(", ")[2] for name in shown] == ["normal start", "torch start"]
    assert len(table) == len(TABLE1) + 1


def test_steps_are_told_for_every_seed():
    rows = steps_table([record(score=score, seed=seed) for seed, score in enumerate((1.0, 0.5))])
    assert rows[0]["Memorize"] == "4 -"
    grid = [record(score=score, rate=rate) for rate, score in ((1e-3, 0.5), (1e-4, 1.0))]
    assert steps_table(grid)[0]["Memorize"] == "4"
    assert rows[0]["Copy"] is None


def until(*scores, seed=0, rate=1e-3):
    """The record of a run with these scores, one a test, that ends when 99.9 % are right."""
    own = job(training=replace(TINY, enough=0.999), seed=seed, learning_rate=rate)
    points = [{"step": 2 * n + 2, "micro": s, "macro": s, "test_loss": 1 - s} for n, s in enumerate(scores)]
    return {"job": asdict(own), "curve": points, "parameters": 7, "seconds": 1.0}


def test_runs_that_end_early_are_compared_by_their_steps(tmp_path):
    """A short run has a low mean over its tests, and no later test: neither decides, or stops the page."""
    fast, slow = until(0.1, 1.0), until(0.9, 0.9, 0.9, rate=1e-2)
    records = [fast, slow, until(0.2, 0.4, 1.0, seed=1)]
    assert baseline_runs(records, "memorization") == [fast, records[2]]
    assert steps_table(records)[0]["Memorize"] == "4 6"
    assert mean_curve([record["curve"] for record in records]) == (
        [2, 4, 6],
        [pytest.approx(0.4), pytest.approx(2.3 / 3), pytest.approx(2.9 / 3)],
    )
    write_report(tmp_path, records, PROFILES["recall"], "fem mad --profile recall")
    page = (tmp_path / "report.md").read_text()
    assert "## Steps to 99.9 %" in page
    assert "mean over the evenly spaced tests" not in page
    assert "mean" not in summary(records)["normal"]["softmax"]
    ordinary = [record()]
    write_report(tmp_path, ordinary, PROFILES["laptop"], "fem mad")
    page = (tmp_path / "report.md").read_text()
    assert "## Steps to 90 %" in page
    assert "mean over the evenly spaced tests" in page
    assert "mean" in summary(ordinary)["normal"]["softmax"]


def test_jobs_of_other_values_have_other_names():
    values = {"mixer": "softmax+G", "seed": 1, "learning_rate": 2e-2, "weight_decay": 0.1, "initialisation": "torch"}
    values |= {"setting": COMPRESS, "training": replace(TINY, heads=4)}
    assert len({job().key, *(job(**{name: value}).key for name, value in values.items())}) == 1 + len(values)
    assert job().key == job().key


def test_a_sweep_ends_in_table_report_and_plots(tmp_path, monkeypatch):
    tiny = Profile("two tasks", "Tiny.", (MEMORIZE, COMPRESS), (1e-3, 1e-2), (0.0,), TINY, "mean")
    monkeypatch.setitem(PROFILES, "tiny", tiny)
    recipe = MADRecipe(profile="tiny", mixers="softmax,softmax+G", seeds=1)
    results = run(recipe, tmp_path / "mad", workers=1)
    folder = tmp_path / "mad"
    assert len(list((folder / "runs").glob("*.json"))) == 8
    names = {
        "config.json",
        "metrics.jsonl",
        "results.json",
        "table.md",
        "table.csv",
        "report.md",
        "curves.png",
        "scores.png",
    }
    assert names <= {path.name for path in folder.iterdir()}
    assert json.loads((folder / "results.json").read_text()) == results
    assert results["mad"]["normal"]["softmax+G"]["mean"].keys() == {"memorization", "compression"}
    page = (folder / "report.md").read_text()
    assert "fem mad --profile tiny --mixers attention,attention+G" in page
    assert "attention+G" in (folder / "table.md").read_text()
    records = lambda: {path: path.stat().st_mtime_ns for path in folder.glob("*/**/*.json")}  # noqa: E731
    before = records()
    assert before
    assert run(recipe, folder)["mad"] == results["mad"]
    assert records() == before  # nothing was trained again


def _killed(*_):
    os._exit(9)


@pytest.mark.slow
def test_a_worker_that_the_system_kills_is_one_sentence(tmp_path):
    with pytest.raises(ChildProcessError, match="was killed, as the system does where memory runs out"):
        list(sweep([job()], tmp_path, _killed, workers=1))


KILLED = """
import sys
from pathlib import Path
from fem_research.mad.settings import Setting, Training
from fem_research.common.names import display
from fem_research.common.sweep import sweep
from fem_research.mad.training import Job, train

if __name__ == "__main__":
    training = Training(
        heads=2, batch=8, warmup=0.1, bfloat16=False, checkpoints=3, test_examples=8, width=16, mlp_width=32
    )
    setting = Setting("memorization", {"vocab_size": 11, "seq_len": 8}, 16, 100_000)
    jobs = [
        Job(mixer="softmax", setting=setting, initialisation="normal", learning_rate=rate, weight_decay=0.0, seed=0,
            training=training)
        for rate in (1e-3, 1e-2)
    ]
    list(sweep(jobs, Path(sys.argv[1]), train, workers=2))
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.path.isdir("/proc"), reason="counts the processes in /proc")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_sweep_leaves_no_process_and_no_half_file(tmp_path, how):
    script = tmp_path / "sweep_to_kill.py"
    script.write_text(KILLED)
    parent = subprocess.Popen([sys.executable, script, tmp_path / "runs"], stderr=subprocess.DEVNULL)

    def workers():
        return [pid for pid in os.listdir("/proc") if pid.isdigit() and _parent(pid) == parent.pid]

    deadline = time.monotonic() + 60
    while len(workers()) < 3 and time.monotonic() < deadline:
        time.sleep(0.2)
    started = workers()
    assert len(started) >= 3, "two workers and the resource tracker"
    time.sleep(5)
    parent.send_signal(how)
    parent.wait(120)
    while any(os.path.isdir(f"/proc/{pid}") for pid in started) and time.monotonic() < deadline + 30:
        time.sleep(0.2)
    assert not [pid for pid in started if os.path.isdir(f"/proc/{pid}")]
    left = {path.name for path in (tmp_path / "runs").rglob("*") if path.is_file()}
    assert left <= {".lock"}


def _parent(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return int(file.read().rpartition(")")[2].split()[1])
    except OSError:
        return None
