"""Every training of the pages that we keep has its row in the record; a run that is added again replaces its own."""

import csv
import json
from pathlib import Path

import pytest

from fem_research.record import EXPERIMENTS, FILES, append, rows_of
from fem_research.report import add_page

PAGE = "# Peak\n\n## How this was made\n\n`fem regimes --tasks peak-64` on 2026-11-24, a CPU.\n"
RESULTS = Path(__file__).parents[1] / "results"


def kept(path: Path) -> dict | None:
    data = json.loads(path.read_text())
    config = data.get("config") if isinstance(data, dict) else None
    return data if config and config["experiment"] in EXPERIMENTS and "stopped" not in data["results"] else None


def read(path: Path) -> list[dict]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def scores(rows: list[dict]) -> set[tuple]:
    return {
        (r["task"], r["mixer"], str(r["seed"]), round(float(r["score"]), 6))
        for r in rows
        if r.get("score") not in (None, "")
    }


NAMES = [path.stem for path in sorted(RESULTS.glob("*.json")) if kept(path)]


@pytest.mark.parametrize("experiment", sorted(EXPERIMENTS))
def test_every_training_of_a_kept_page_has_a_row(experiment):
    record = scores([row for file in RESULTS.glob("*.csv") if "curves" not in file.stem for row in read(file)])
    lost = {}
    for name in NAMES:
        data = kept(RESULTS / f"{name}.json")
        if data["config"]["experiment"] == experiment and (experiment != "ablate" or "curves" in data["results"]):
            missing = scores(rows_of(data["config"], data["results"])) - record
            lost |= {name: missing} if missing else {}
    assert not lost


def test_a_run_that_is_added_again_replaces_its_own_rows(tmp_path):
    for name in ("regimes_wide", "regimes_peak64", "regimes_wide"):
        data = kept(RESULTS / f"{name}.json")
        [path] = append(tmp_path, name, f"fem regimes {name}", data["config"], data["results"])
    rows = read(path)
    expected = sum(len(rows_of(**kept(RESULTS / f"{name}.json"))) for name in ("regimes_wide", "regimes_peak64"))
    assert path.name == "regimes.csv"
    assert len(rows) == expected
    assert {row["command"] for row in rows} == {"fem regimes regimes_wide", "fem regimes regimes_peak64"}
    assert not list(tmp_path.glob("*.part"))


def test_pools_stand_together_whichever_command_trained_them(tmp_path):
    data = kept(RESULTS / "regimes_pools.json")
    [path] = append(tmp_path, "pools", "fem regimes", data["config"], data["results"])
    assert path.name == "pooling.csv"
    assert scores(read(path)) <= scores(read(RESULTS / "pooling.csv"))


def test_an_experiment_without_trainings_adds_nothing(tmp_path):
    assert append(tmp_path, "demo", "fem demo", {"experiment": "demo"}, {}) == []
    assert not list(tmp_path.iterdir())


def test_fem_report_adds_a_run_to_the_record(tmp_path):
    run, output = tmp_path / "peak", tmp_path / "results"
    run.mkdir()
    data = json.loads((RESULTS / "regimes_wide.json").read_text())
    for name in ("config", "results"):
        (run / f"{name}.json").write_text(json.dumps(data[name]))
    (run / "report.md").write_text(PAGE)
    add_page(run, output)
    rows = read(output / "regimes.csv")
    assert {(row["run"], row["command"]) for row in rows} == {("peak", "fem regimes --tasks peak-64")}
    assert scores(rows) == scores(rows_of(**data))


def test_every_file_of_the_record_is_there():
    assert all((RESULTS / f"{FILES.get(name, name)}.csv").exists() for name in EXPERIMENTS)
