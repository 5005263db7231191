"""The tasks of `fem regimes` against loops, equal sizes of its models, and a run that goes on after a kill."""

import json
import math
import re
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.datasets import load_digits
from torch import Generator

from fem_research.common.grid import record_of
from fem_research.common.mixers import KNOWN_ANSWERS, POOLS, canonical, fields_of, mixer_config
from fem_research.common.paired import paired, shown
from fem_research.regimes import experiment
from fem_research.regimes.experiment import RegimesRecipe, lead, over, run, table, title
from fem_research.regimes.settings import OF_FILES, ROWS, USUAL, WIDE
from fem_research.regimes.tasks import (
    HELD_OUT,
    NOT_ASKED,
    WINDOW,
    DailyExtremes,
    Exceeded,
    HighWater,
    PeakHold,
    Recall,
    SetStatistics,
    Snapshot,
    Speakers,
    digits,
    rows,
    speeches,
)
from fem_research.regimes.training import FROM_FILE, TASKS, Training, build, train

draw = lambda task, size=3, split="train", seed=0: task.draw(Generator().manual_seed(seed), size, split)  # noqa: E731
TINY = {"width": 16, "heads": 2, "mlp_width": 40, "batch": 4, "steps": 3}


def test_peaks_are_running_extremes():
    x, y = draw(PeakHold(sensors=3, tokens=5))
    for b, t, c in np.ndindex(3, 5, 3):
        seen = x[b, : t + 1, c].tolist()
        assert (y[b, t, c], y[b, t, c + 3]) == (max(seen), min(seen))


@pytest.mark.parametrize(("task", "pick"), [(HighWater, max), (Snapshot, lambda values: values[-1])])
def test_events_are_told_by_field(task, pick):
    x, y = draw(task(fields=3, values=4, tokens=9))
    for b, t, f in np.ndindex(3, 9, 3):
        values = [x[b, i, 3:].argmax().item() for i in range(t + 1) if x[b, i, f] == 1]
        assert y[b, t, f] == (pick(values) if values else NOT_ASKED)
    assert (x.sum(-1) == 2).all()


def test_statistics_are_means_and_counts_of_what_came():
    x, y = draw(SetStatistics(each=2, tokens=6))
    assert y[:, :3].isnan().all()
    for b, t in np.ndindex(3, 3):
        seen = x[b, : t + 4]
        torch.testing.assert_close(y[b, t + 3, :2], seen[:, :2].mean(0) * math.sqrt(6))
        torch.testing.assert_close(y[b, t + 3, 2:], seen[:, 2:4].sum(0) / math.sqrt(0.2 * 0.8 * 6))
    assert x[:, 0, -1].tolist() == [1.0] * 3
    assert x[:, 1:, -1].abs().max() == 0


def test_recall_asks_for_the_value_that_a_key_was_shown_with():
    x, y = draw(Recall(pairs=4, keys=6, values=5, queries=7))
    assert (y[:, :4] == NOT_ASKED).all()
    for b, t in np.ndindex(3, 7):
        (shown_at,) = [i for i in range(4) if torch.equal(x[b, i, :6], x[b, 4 + t, :6])]
        assert x[b, shown_at, 6:].argmax() == y[b, 4 + t, 0]
        assert x[b, 4 + t, 6:].abs().max() == 0


def test_bags_ask_what_is_in_them_and_never_test_a_picture_that_trained():
    pictures, labels = digits()
    assert labels.tolist() == load_digits().target.tolist()  # in the file's order, a writer's pictures together
    x, y = draw(TASKS["bags"], 4, "test")
    own = pictures[HELD_OUT["test"]]
    for b in range(4):
        found = [(own == picture).all(1).nonzero()[0, 0].item() for picture in x[b, :-1, :-1]]
        inside = {labels[HELD_OUT["test"]][i].item() for i in found}
        assert y[b, -1].tolist() == [int(digit in inside) for digit in range(10)] + [max(inside), len(inside) - 1]
    assert (y[:, :-1] == NOT_ASKED).all()
    taken = [set(range(1797)[part]) for part in HELD_OUT.values()]
    assert not taken[0] & taken[1] | taken[0] & taken[2] | taken[1] & taken[2]
    assert set().union(*taken) == set(range(1797))


def test_days_of_ett_are_told_from_their_last_96_rows(tmp_path):
    values = np.random.default_rng(0).standard_normal((1200, 7)).round(3)
    path = tmp_path / "ett.csv"
    pd.DataFrame({"date": range(1200)} | {f"c{i}": values[:, i] for i in range(7)}).to_csv(path, index=False)
    other = tmp_path / "other.csv"
    other.write_text("time,value\n1,2\n")
    with pytest.raises(ValueError, match=r"^ett must be a table of ETT, a column date and 7 channels, got "):
        rows(str(other))
    table = rows(str(path))
    assert [len(part) for part in table.values()] == [720, 240, 240]
    torch.testing.assert_close(table["train"].std(0), torch.ones(7))
    limit = table["train"].quantile(0.9, 0)
    for task in (DailyExtremes(str(path)), Exceeded(str(path))):
        x, y = draw(task, 2, "test")
        assert x.shape == (2, 2 * WINDOW, 7)
        for t in (WINDOW, WINDOW + 5, 2 * WINDOW - 1):
            day = x[:, t - WINDOW + 1 : t + 1]
            wanted = (
                (day.amax(1) > limit).long()
                if isinstance(task, Exceeded)
                else torch.cat([day.amax(1), day.amin(1)], -1)
            )
            assert torch.equal(y[:, t], wanted)
        asked = y[:, :WINDOW]
        assert (asked.isnan() if asked.is_floating_point() else asked == NOT_ASKED).all()


@pytest.mark.parametrize("name", TASKS)
def test_scores_are_1_for_the_truth_and_constants_for_what_never_looks(name):
    task = TASKS[name]
    x, y = draw(task, 60, "test")
    assert x.shape[-1] == task.channels
    if y.is_floating_point():
        truth, blind = y.nan_to_num(), y.nanmean(0, keepdim=True).nan_to_num().expand_as(y)
    else:
        truth = torch.nn.functional.one_hot(y.clamp_min(0), task.classes).flatten(-2).float()
        counts = torch.nn.functional.one_hot(y.clamp_min(0), task.classes) * (y != NOT_ASKED)[..., None]
        blind = counts.sum(0, keepdim=True).flatten(-2).expand_as(truth).float()
    assert truth.shape[-1] == task.outputs
    assert task.score(truth, y) == pytest.approx(1)
    assert task.score(blind, y) == pytest.approx(task.constant(y), abs=1e-6)
    assert task.constant(y) < 0.7
    again = draw(task, 60, "test")
    assert torch.equal(again[0], x)
    assert not torch.equal(draw(task, 60, "test", seed=1)[0], x)


def test_an_mlp_too_narrow_to_make_up_for_a_mixer_is_one_sentence():
    with pytest.raises(ValueError, match=r"^\S+ has [\d,]+ parameters more than its baseline, .* at least \d+ wide\.$"):
        build(TASKS["peak"], "softmax+CLTG", Training(mlp_width=1))


def test_the_recipe_names_every_task_and_which_need_a_file():
    assert tuple(TASKS) == USUAL + WIDE
    assert FROM_FILE.keys() == OF_FILES.keys()


def test_all_rows_have_the_same_parameters():
    training = Training()
    count = lambda name: sum(p.numel() for p in build(TASKS["bags"], canonical(name), training).parameters())  # noqa: E731
    wanted = count("softmax")
    rows = [*ROWS.split(","), "softmax+LTG/wide", "softmax+LTG/r4/b8", "softmax/h16/norope", "FEM/h16/r4"]
    rows += ["softmax/double", "softmax/conv", "FEM/thirds"]
    assert {name: count(name) for name in rows} == {name: pytest.approx(wanted, rel=0.01) for name in rows}
    known = [sum(p.numel() for p in build(TASKS["peak"], name, training).parameters()) for name in KNOWN_ANSWERS]
    assert known == pytest.approx(
        [sum(p.numel() for p in build(TASKS["peak"], "softmax", training).parameters())] * 2, rel=0.01
    )
    pools = [sum(p.numel() for p in build(TASKS["bags"], name, training).parameters()) for name in POOLS]
    assert max(pools) == pytest.approx(min(pools), rel=0.01)


@pytest.mark.parametrize(
    ("name", "meaning"),
    [
        ("fem-sm/r4", "softmax+CLTG/r4"),
        ("softmax+LTG/r4/b8", "softmax+LTG/b8/r4"),
        ("gla/norm", "gla/norm"),
        ("gla+L/norm", "gla+L"),
        ("softmax/norm", "softmax"),
        ("softmax/norope/h16", "softmax/h16/norope"),
        ("softmax+LTG/l-2.5/wide", "softmax+LTG/l-2.5/wide"),
        ("softmax+C/conv/c16", "softmax+C/c16/conv"),
    ],
)
def test_options_stand_behind_slashes(name, meaning):
    assert canonical(name) == canonical(meaning) == meaning


def test_options_become_fields():
    fields = fields_of(canonical("softmax+LTG/r4/b8/l6"))
    assert (fields["gate_rank"], fields["lambda_init"]) == (4, 6.0)
    assert math.log1p(math.exp(fields["beta_max_init"])) == pytest.approx(8)
    assert fields_of("gla-norm")["normalize"] is False
    config = mixer_config("softmax/h16/norope", 64, 4)
    assert (config.n_head, config.use_rope) == (16, False)
    assert mixer_config("softmax+CG/c16/double", 512, 8).conv_hidden == 16
    assert "normalize" not in fields_of("gla/norm")
    for name, widths in (("softmax+LTG/wide", (512, 512)), ("softmax/double", (1024, 512)), ("FEM/thirds", (344, 352))):
        config = mixer_config(name, 512, 8)
        assert (config.fem_dim, config.qk_dim) == widths


@pytest.mark.parametrize(
    "name",
    [
        *(
            "softmax/r4",
            *("softmax+G/b8", "softmax/c16", "softmax+C/c0"),
            "softmax+LTG/r",
            "softmax+LTG/r4/r8",
            *("softmax/h8/h16", "softmax/wide/double"),
            "softmax/h0",
            "softmax+LTG/x",
        ),
        *("softmax+LTG/b0", "softmax+LTG/b1000", "gla-norm/norm"),
    ],
)
def test_options_without_meaning_are_one_sentence(name):
    with pytest.raises(ValueError, match="got '"):
        canonical(name)


def test_paired_differences_have_the_standard_error_of_the_differences():
    assert paired([1.0, 2.0, 3.0], [0.5, 1.5, 2.5]) == (0.5, 0.0)
    difference, error = paired([1.0, 2.0], [0.0, 0.0])
    assert (difference, error) == (1.5, pytest.approx(0.5))
    assert shown([1.0], [0.75]) == "+0.250"
    with pytest.raises(ValueError, match="got 1 and 2"):
        paired([1.0], [1.0, 2.0])


def test_a_run_writes_its_page_and_goes_on_where_it_was(tmp_path, monkeypatch, capsys):
    recipe = RegimesRecipe(tasks="peak", mixers="softmax,fem-sm/r4", learning_rates="0.01,0.001", seeds=2, **TINY)
    trained = []

    def sweep(jobs, folder, train, workers):
        folder.mkdir(parents=True, exist_ok=True)
        for job in jobs:
            trained.append(job.key)
            found = train(job, torch.device("cpu"))
            record = {"job": json.loads(json.dumps(job, default=lambda j: j.__dict__))} | found
            (folder / f"{job.key}.json").write_text(json.dumps(record))
            yield record

    monkeypatch.setattr(experiment, "sweep", sweep)
    results = run(recipe, tmp_path / "regimes")
    assert len(trained) == len(set(trained)) == 2 * 2 + 2
    told = capsys.readouterr().err.splitlines()
    assert len(told) == len(trained)
    assert re.fullmatch(r"regimes: peak: attention, rate 0\.01, seed 0: -?\d+\.\d{3} \(1/4\)", told[0])
    row = results["regimes"]["peak"]["softmax+CLTG/r4"]
    assert len(row["test"]) == len(row["seconds"]) == 2
    assert row["validation_by_rate"].keys() == {"0.01", "0.001"}
    assert row["beta"][0]["beta"] == pytest.approx(1.95, abs=0.1)
    page = (tmp_path / "regimes" / "report.md").read_text()
    assert "fem regimes --tasks peak --mixers attention,FEM/r4" in page
    assert (tmp_path / "regimes" / "scores.png").read_bytes().startswith(b"\x89PNG")
    next((tmp_path / "regimes" / "runs").glob("*.json")).write_text("{")
    assert run(recipe, tmp_path / "regimes")["regimes"] == results["regimes"]
    assert len(trained) == 7
    jobs = [recipe.job("peak", row, rate, 0) for row in recipe.rows for rate in recipe.rates]
    assert all(record_of(job, tmp_path / "regimes" / "runs") for job in jobs)


@pytest.mark.parametrize("task", ["peak", "snapshot"])
def test_a_training_that_diverged_has_no_score(task):
    recipe = RegimesRecipe(tasks=task, mixers="softmax", learning_rates="1e30", **TINY)
    assert math.isnan(train(recipe.job(task, "softmax", 1e30, 0), torch.device("cpu"))["curve"][-1]["validation"])


def a_play(path, speakers=10, words=500):
    """Speaker s says the words s0, s1 .. in speeches of 50, all speakers in turn."""
    letters = "abcdefghij"[:speakers]
    word = lambda letter, index: letter + "".join("klmnopqrst"[int(digit)] for digit in f"{index:03}")  # noqa: E731
    speech = lambda letter, start: " ".join(word(letter, start + index) for index in range(50))  # noqa: E731
    turns = [f"{letter.upper()}:\n{speech(letter, start)}" for start in range(0, words, 50) for letter in letters]
    path.write_text("\n\n".join(turns))
    return path


def test_words_are_asked_for_their_speaker_and_the_test_is_said_later(tmp_path):
    task = Speakers(str(a_play(tmp_path / "play.txt")))
    known, said = speeches(task.path)
    assert known == 1001
    for who in range(10):
        assert [len(said[split][who]) for split in HELD_OUT] == [300, 100, 100]
    x, targets = task.draw(Generator().manual_seed(0), 50)
    assert x.shape == (50, 33, 1002)
    torch.testing.assert_close(x.sum(-1), torch.ones(50, 33))
    assert (targets[:, :-1] == NOT_ASKED).all()
    numbers = x[:, :-1].argmax(-1)
    for row, who in zip(numbers, targets[:, -1, 0]):
        windows = said["train"][who].unfold(0, 32, 1)
        assert (windows == row).all(1).any()
    seen, later = ({int(n) for part in said[split] for n in part} - {1000} for split in ("train", "test"))
    assert not seen & later


def test_a_play_needs_ten_speakers(tmp_path):
    with pytest.raises(ValueError, match="ten speakers of 320 words or more"):
        speeches(str(a_play(tmp_path / "play.txt", speakers=9)))


def scored(*scores):
    training = {"width": 16, "heads": 2}
    return [
        {"job": {"training": training, "learning_rate": 0.01}, "curve": [{"test": s}], "parameters": 1, "seconds": 1.0}
        for s in scores
    ]


def test_a_row_is_compared_with_attention_or_with_the_papers_start_of_the_same_mixer():
    starts = {"softmax+LTG/b8/r4": scored(0.5, 0.7), "softmax+LTG/r4": scored(0.4, 0.5)}
    for row, other, said in (("softmax", None, ""), ("softmax+LTG/b8/r4", "softmax", "+0.350 ± 0.050")):
        rows = starts | {"softmax": scored(0.2, 0.3)}
        assert ((lead(row, rows) or {}).get("row"), over(row, rows)) == (other, said)
    lines = {line["mixer"]: line["over the paper's start"] for line in table(starts)}
    assert lines == {"attention+LTG/b8/r4": "+0.150 ± 0.050", "attention+LTG/r4": ""}
    assert "over attention" in table({"softmax": scored(0.1), "softmax+G": scored(0.2)})[0]
    assert not any(name.startswith("over") for name in table({"softmax+G": scored(0.1)})[0])


def test_of_several_attentions_the_best_is_what_rows_are_compared_with():
    rows = {"softmax": scored(0.2), "softmax/h16/norope": scored(0.4), "softmax/h8": scored(0.3), "gru": scored(0.9)}
    assert lead("softmax/h16/norope", rows) is None
    assert {lead(row, rows)["row"] for row in ("softmax", "softmax/h8", "gru")} == {"softmax/h16/norope"}


@pytest.mark.parametrize(
    "wanted, options",
    [
        ("Does the free energy help?", {}),
        ("Does the free energy help? Peak", {"tasks": "peak"}),
        ("Does the free energy help? Peak; 2 blocks; 1 head", {"tasks": "peak", "blocks": 2, "heads": 1}),
        ("Does the free energy help? Starts of beta and lambda", {"mixers": "softmax+LTG,softmax+LTG/b8"}),
        ("Does the free energy help? Values as wide as the model", {"mixers": "softmax,softmax+LTG/wide"}),
        ("Does the free energy help? More heads; peak", {"tasks": "peak", "mixers": "softmax/h16,FEM"}),
        ("Pooling a set: bags", {"tasks": "bags", "mixers": "pool:fem"}),
    ],
)
def test_pages_of_different_questions_have_different_titles(wanted, options):
    assert title(RegimesRecipe(**options)) == wanted


def test_rows_of_a_seed_see_the_same_examples(monkeypatch):
    recipe = RegimesRecipe(tasks="recall", mixers="softmax,softmax+G", learning_rates="0.01", seeds=1, **TINY)
    seen = []
    task = TASKS["recall"]
    monkeypatch.setattr(type(task), "draw", partial(_watched, task.draw, seen))
    for job in (recipe.job("recall", row, rate, recipe.seed) for row in recipe.rows for rate in recipe.rates):
        train(job, torch.device("cpu"))
    first, second = seen[: len(seen) // 2], seen[len(seen) // 2 :]
    assert len(first) == 5
    assert all(torch.equal(a, b) for a, b in zip(first, second))


def _watched(draw, seen, *arguments):
    example = draw(*arguments[-3:]) if len(arguments) > 2 else draw(*arguments)
    seen.append(example[0])
    return example


def test_other_bytes_in_a_file_are_another_training(tmp_path):
    recipe = RegimesRecipe(tasks="speakers", play=tmp_path / "play.txt")
    keys = set()
    for text in ("one", "two"):
        recipe.play.write_text(text)
        keys.add(recipe.job("speakers", "softmax", 0.01, 0).key)
    assert len(keys) == 2
