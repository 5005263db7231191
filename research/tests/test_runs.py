"""Run folders, tables and progress of the experiments."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial

import pytest

from fem.recipes import option
from fem.tables import show_table
from fem_research.runs import run as recipe
from fem_research.runs import tables
from fem_research.runs.run import open_run


@dataclass(frozen=True)
class Recipe:
    seed: int = option(5, "Seed.")


def test_without_a_terminal_progress_is_a_line_per_evaluation(capsys):
    with recipe.progress() as bars:
        bar = bars.add_task("reading", total=4)
        for step, description in (
            (1, "reading"),
            (2, "reading, loss 2.5"),
            (3, "reading, loss 2.5"),
            (4, "reading, [x]"),
        ):
            bars.update(bar, completed=step, description=description)
    assert capsys.readouterr().err == "reading, loss 2.5 (2/4)\nreading, [x] (4/4)\n"


def test_the_best_of_a_column_is_bold():
    rows = [{"mixer": "a", "loss": "5.1 (5.0)", "hits": 3}, {"mixer": "b", "loss": "4.9", "hits": None}]
    table = tables.markdown_table([*rows, {"mixer": "c", "loss": "", "hits": 1200}], {"loss": min, "hits": max})
    assert "| b | **4.9** |  |" in table
    assert "**1,200**" in table
    assert table.count("**") == 4
    table = tables.markdown_table([{"loss": 1.5e-05}, {"loss": 0.0003}], {"loss": min})
    assert "**1.500e-05**" in table


def test_a_column_that_is_blank_in_every_row_is_left_out():
    table = tables.markdown_table([{"mixer": "a", "sd": None, "loss": 0}, {"mixer": "b", "sd": "", "loss": None}])
    assert table.splitlines()[0] == "| mixer | loss |"
    assert "| b |  |" in table


def test_a_finished_run_appears_whole(tmp_path):
    with open_run(tmp_path / "deep" / "run", "test", Recipe()) as run:
        run.log(step=1, loss=0.5)
        run.log(step=2, loss=0.25)
        (run.folder / "model").mkdir()
        (run.folder / "model" / "weights").write_bytes(b"w")
        run.finish({"score": 1.0})
        assert not (tmp_path / "deep" / "run").exists()
    folder = tmp_path / "deep" / "run"
    assert json.loads((folder / "config.json").read_text())["recipe"] == {"seed": 5}
    assert [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()] == [0.5, 0.25]
    results = json.loads((folder / "results.json").read_text())
    assert results.keys() == {"score", "versions", "seed"}
    assert (results["score"], results["seed"]) == (1.0, 5)
    assert (folder / "model" / "weights").read_bytes() == b"w"
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["run"]


@pytest.mark.parametrize("stop", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_a_stopped_run_leaves_the_earlier_one_as_it_was(tmp_path, stop):
    with open_run(tmp_path / "run", "test", Recipe()) as run:
        run.finish({"score": 1})
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}

    def stopped():
        with open_run(tmp_path / "run", "test", Recipe()) as run:
            run.finish({"score": 2})
            raise stop

    with pytest.raises(stop):
        stopped()
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_run_is_written_on_the_disk_of_its_folder(tmp_path):
    (tmp_path / "run").mkdir()  # a volume of a container, say: files of its parent cannot be renamed into it
    with open_run(tmp_path / "run", "test", Recipe()) as run:
        assert tmp_path / "run" in run.folder.parents
        run.finish({})
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["config.json", "results.json"]


def test_what_a_killed_run_leaves_is_removed_by_the_next_and_what_another_writes_is_not(tmp_path):
    begin = partial(open_run, tmp_path / "run", "test", Recipe())
    if not (child := os.fork()):
        held = begin()  # kept, or it would end here
        held.__enter__().log(step=1)
        os._exit(9)
    os.waitpid(child, 0)
    assert [path.name for path in tmp_path.rglob("*.jsonl")] == ["metrics.jsonl"]
    with begin() as run:
        with pytest.raises(ValueError, match="another training writes to"):
            begin().__enter__()
        run.finish({})
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["config.json", "results.json", "run"]


STRANGERS = {  # what may lie in an output folder, and what the refusal says
    "a user's file": ({"results.json": "{}"}, "be empty or the folder of the same run.*results.json"),
    "a broken config": ({"config.json": "{", "report.md": "mine"}, "be empty or the folder of the same run"),
    "a model": ({"config.json": '{"model_type": "gpt2"}'}, "hold another.* belongs to no run"),
    "another experiment": ({"config.json": '{"experiment": "mad", "recipe": {}}'}, "hold another.*a run of fem mad"),
}


@pytest.mark.parametrize("stranger", [*STRANGERS, "another recipe"])
def test_no_run_begins_in_a_folder_of_other_things(tmp_path, stranger):
    other = {"config.json": json.dumps({"experiment": "test", "recipe": {"seed": 1}})}
    files, words = STRANGERS.get(stranger, (other, "hold the results of another recipe.* there, "))
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=f"output must (not )?{words}"):
        open_run(tmp_path, "test", Recipe()).__enter__()
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == files


def test_a_comparison_may_be_widened_in_its_folder(tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "report.md").write_text("mine")
    with pytest.raises(ValueError, match=r"report\.md"), open_run(tmp_path, "test", Recipe()):
        pass
    (tmp_path / "config.json").write_text(json.dumps({"experiment": "test", "recipe": {"seed": 1}}))
    with open_run(tmp_path, "test", Recipe()) as run:
        run.finish({})
    assert (tmp_path / "results.json").exists()


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="signals as POSIX has them")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_command_that_is_stopped_leaves_nothing(tmp_path, number):
    command = [sys.executable, "-m", "fem.cli", "argmax", "--steps", "1000000", "--enough", "2"]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while not list(tmp_path.glob("runs/.argmax-*/*/metrics.jsonl")) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert list(tmp_path.glob("runs/.argmax-*/*/metrics.jsonl"))
        process.send_signal(number)
        assert process.wait(120) != 0
    finally:
        process.kill()
    assert list((tmp_path / "runs").iterdir()) == []


def test_tables_are_blank_where_nothing_was_run(tmp_path):
    rows = [{"mixer": "fem", "loss": 5.1, "tokens": 12345}, {"mixer": "gla", "loss": None, "tokens": 1234.5}]
    tables.write_table(tmp_path, "table", rows)
    assert (tmp_path / "table.md").read_text() == (
        "| mixer | loss | tokens |\n| --- | ---: | ---: |\n| fem | 5.100 | 12,345 |\n| gla |  | 1,234 |\n"
    )
    with open(tmp_path / "table.csv", newline="") as file:
        assert list(csv.DictReader(file))[1] == {"mixer": "gla", "loss": "", "tokens": "1234.5"}


def test_a_table_without_rows_is_empty(tmp_path, capsys):
    tables.write_table(tmp_path, "table", [])
    show_table("Optional packages", [])
    assert not (tmp_path / "table.csv").read_text().strip()
    assert not capsys.readouterr().out.strip()
