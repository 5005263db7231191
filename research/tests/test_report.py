"""`fem report`: runs join the record, and its pages are drawn again."""

import csv
import json
import multiprocessing
import time

import pytest

pytest.importorskip("typer", reason="needs free-energy-mixer[cli]")

from fem.tables import markdown_table
from fem_research import record
from fem_research.report import add_run, add_runs
from fem_research.runs.tables import write_page

MADE = {"hardware": {"processor": "a CPU", "threads": 1, "gpus": []}, "versions": {"python": "3"}, "date": "2026"}
RECIPE = {"width": 64, "heads": 4, "seed": 0, "learning_rate": 0.001, "epochs": 1, "data": "/of/a/machine/digits"}
FOUND = {"accuracies": [0.5, 0.25], "losses": [1.0, 2.0], "speeds": [3.0, 4.0], "parameters": 9}
PAGE = """# Mine

<!-- table: vision.csv: task=digits: mixer: score mean -->
<!-- end -->

<!-- picture: vision.csv: task=digits: mixer / task: score: dots.png -->
"""


def made_up_run(folder, experiment="vision", results=None, recipe=None):
    folder.mkdir(parents=True)
    made = f"`fem {experiment} --seeds 2` on 2026-11-27, a CPU.\n"
    (folder / "report.md").write_text(f"# A run\n\n## How this was made\n\n{made}")
    config = {"experiment": experiment, "recipe": RECIPE if recipe is None else recipe} | MADE
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "results.json").write_text(json.dumps({"vision": {"FEM": FOUND}} if results is None else results))
    return folder


def rows(output, name="vision"):
    with open(output / f"{name}.csv", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def output(tmp_path):
    (tmp_path / "results").mkdir()
    return tmp_path / "results"


def test_a_run_s_trainings_join_the_record_and_the_pages_are_drawn(tmp_path, output):
    (output / "mine.md").write_text(PAGE)
    assert add_runs([made_up_run(tmp_path / "vision-digits")], output) == 1
    first, second = rows(output)
    assert (first["run"], first["mixer"], first["score"], second["score"]) == ("vision_digits", "FEM", "0.5", "0.25")
    assert first["command"] == "fem vision --seeds 2"
    assert first["task"] == "digits"  # without the folders of the machine
    assert "| FEM | 0.3750 |" in (output / "mine.md").read_text()
    assert (output / "dots.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_that_is_added_again_replaces_its_own_rows_alone(tmp_path, output, capsys):
    one, two = (made_up_run(tmp_path / name) for name in ("one", "two"))
    add_runs([one, two], output)
    (one / "results.json").write_text(json.dumps({"vision": {"FEM": FOUND | {"accuracies": [0.75, 1.0]}}}))
    add_runs([one], output)
    scores = {(row["run"], row["score"]) for row in rows(output)}
    assert scores == {("one", "0.75"), ("one", "1.0"), ("two", "0.5"), ("two", "0.25")}
    assert "note" not in capsys.readouterr().err
    config = json.loads((one / "config.json").read_text()) | {"date": "2027"}
    (one / "config.json").write_text(json.dumps(config))
    add_runs([one], output)
    assert "the rows of 'one' in vision.csv were made on 2026; they are replaced" in capsys.readouterr().err


def test_a_smaller_run_of_the_same_name_replaces_none(tmp_path, output):
    run = made_up_run(tmp_path / "one")
    add_runs([run], output)
    found = {"vision": {"FEM": FOUND | {"accuracies": [0.5], "losses": [1.0], "speeds": [3.0]}}}
    (run / "results.json").write_text(json.dumps(found))
    with pytest.raises(ValueError, match=r"got 1 of 'one', of which vision.csv has 2; give the folder another name"):
        add_runs([run], output)
    assert len(rows(output)) == 2


def test_rows_of_other_settings_or_trainings_are_not_replaced(tmp_path, output):
    run = made_up_run(tmp_path / "one")
    add_runs([run], output)
    made = (run / "report.md").read_text()
    (run / "report.md").write_text(made.replace("--seeds 2", "--seeds 2 --epochs 3"))
    with pytest.raises(
        ValueError, match=r"got 'one' by 'fem vision .* by 'fem vision --seeds 2'; give .* another name"
    ):
        add_runs([run], output)
    (run / "report.md").write_text(made.replace("--seeds 2", "--mixers attention --seeds 2"))
    (run / "results.json").write_text(json.dumps({"vision": {"attention": FOUND}}))
    with pytest.raises(ValueError, match=r"of which vision\.csv has FEM of digits by"):
        add_runs([run], output)
    (run / "results.json").write_text(json.dumps({"vision": {"attention": FOUND, "FEM": FOUND}}))
    add_runs([run], output)
    assert [row["mixer"] for row in rows(output)] == ["attention"] * 2 + ["FEM"] * 2


def test_processes_that_add_at_once_lose_no_rows(tmp_path, output, monkeypatch):
    replacing = record.replacing
    monkeypatch.setattr(
        record, "replacing", lambda path: (time.sleep(0.3), replacing(path))[1]
    )  # others read meanwhile
    runs = [made_up_run(tmp_path / f"run{number}") for number in range(4)]
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=add_runs, args=([run], output)) for run in runs]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert sorted(row["run"] for row in rows(output)) == sorted([run.name for run in runs] * 2)


def test_a_run_takes_the_place_of_no_other(tmp_path, output):
    runs = [made_up_run(tmp_path / folder / "run") for folder in "ab"]
    with pytest.raises(ValueError, match=r"names of their own in the record, got .*a/run and .*b/run"):
        add_runs(runs, output / "new")
    assert not (output / "new").exists()
    found = {"accuracy": [0.5], "over": None, "parameters": 9, "rates": {"0.01": 3}}
    pools = {"natural": {"birds": {"pool:max": found}}}
    recipe = RECIPE | {"steps": 60}
    add_run(made_up_run(tmp_path / "c" / "run", "natural", pools, recipe), output)
    regimes = {"learning_rate": 0.1, "parameters": 9, "test": [0.5], "beta": [{}], "seconds": [1.0]}
    regimes = {"regimes": {"bags": {"pool:max": regimes | {"validation_by_rate": {}}}}, "constants": {"bags": 0.1}}
    recipe |= {"blocks": 1, "mlp_width": 8}
    with pytest.raises(ValueError, match=r"names of their own, got 'run', which pooling.csv has of 'fem natural"):
        add_run(made_up_run(tmp_path / "d" / "run", "regimes", regimes, recipe), output)


@pytest.mark.parametrize("missing", ["report.md", "results.json", "config.json"])
def test_a_run_that_has_not_ended_is_refused_by_name(tmp_path, missing):
    """And nothing is written, not of runs before it either."""
    ended, run = made_up_run(tmp_path / "ended"), made_up_run(tmp_path / "run")
    (run / missing).unlink()
    with pytest.raises(ValueError, match=f"runs must be folders of runs that have ended, got .* without {missing}"):
        add_runs([ended, run], tmp_path / "results")
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(
    "name, text, sentence",
    [
        ("config.json", b"\0\0", "cannot be read"),
        ("results.json", b'{"cut', "cannot be read"),
        ("results.json", b"[]", "holds no JSON object"),
        ("results.json", b"{}", "has no trainings"),
        ("config.json", b"{}", "does not say which experiment"),
        ("report.md", b"\xff\xfe", "no text in UTF-8"),
    ],
)
def test_a_broken_run_is_left_out_with_a_sentence(tmp_path, output, capsys, name, text, sentence):
    good, broken = (made_up_run(tmp_path / run) for run in ("good", "broken"))
    (broken / name).write_bytes(text)
    assert add_runs([broken, good], output) == 1
    said = capsys.readouterr()
    assert sentence in said.err
    assert said.err.count("note:") == 1
    assert {row["run"] for row in rows(output)} == {"good"}


def test_a_run_of_another_version_is_left_out_with_a_sentence(tmp_path, output, capsys):
    assert add_runs([made_up_run(tmp_path / "old", results={"vision": {"FEM": {}}})], output) == 0
    assert "was made by another version: it has no 'accuracies'" in capsys.readouterr().err


def test_names_in_titles_and_tables_are_text(tmp_path):
    write_page(tmp_path, "[x](javascript:alert(1)) <script>\n# more", markdown_table([{"a": "b | <i>\nc", "n": 1}]))
    lines = (tmp_path / "report.md").read_text().splitlines()
    assert lines[0] == r"# \[x\](javascript:alert(1)) \<script\> \# more"
    assert lines[-1] == "| b &#124; &lt;i> c | 1 |"


def test_without_names_every_finished_run_is_taken(tmp_path, monkeypatch, output):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="runs must be named"):
        add_runs(None, tmp_path / "new")
    made_up_run(tmp_path / "runs" / "one")
    (made_up_run(tmp_path / "runs" / "two") / "results.json").unlink()
    made_up_run(tmp_path / "runs" / ".three-4")  # what a killed run leaves
    assert add_runs(None, output) == 1
    assert {row["run"] for row in rows(output)} == {"one"}


def test_the_record_is_not_written_among_the_files_of_a_run(tmp_path):
    run = made_up_run(tmp_path / "run")
    (run / "table.csv").touch()
    with pytest.raises(ValueError, match=r"output must be a folder of results, got .* with a run"):
        add_runs([run], run)


def test_a_training_is_no_run_of_an_experiment(tmp_path, output):
    (tmp_path / "train" / "checkpoint-5").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"got the training .*; fem eval --model"):
        add_runs([tmp_path / "train"], output)
