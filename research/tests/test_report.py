"""`fem report`: runs become pages beside the paper's tables."""

import json

import pytest

pytest.importorskip("typer", reason="needs free-energy-mixer[cli]")

from fem.tables import markdown_table
from fem_research.report import add_page, add_pages, index, redraw, table2
from fem_research.runs.tables import write_page

MADE = {"hardware": {"processor": "a CPU", "threads": 1, "gpus": []}, "versions": {"python": "3"}, "date": "2026"}


def made_up_run(folder, experiment="ablate", results=None, recipe=None, body="A table.\n\n![a plot](loss.png)"):
    folder.mkdir(parents=True)
    (folder / "report.md").write_text(f"# A run\n\n{body}\n\n## How this was made\n\nBy hand.\n")
    (folder / "loss.png").write_bytes(b"picture")
    (folder / "config.json").write_text(json.dumps({"experiment": experiment, "recipe": recipe or {}} | MADE))
    (folder / "results.json").write_text(json.dumps(results or {}))
    return folder


@pytest.fixture
def output(tmp_path):
    (tmp_path / "results").mkdir()
    return tmp_path / "results"


def test_a_page_brings_its_pictures_and_numbers(tmp_path, output):
    add_page(made_up_run(tmp_path / "ablate-gla", results={"loss": 4.5}), output)
    assert "](ablate_gla_loss.png)" in (output / "ablate_gla.md").read_text()
    assert (output / "ablate_gla_loss.png").read_bytes() == b"picture"
    assert json.loads((output / "ablate_gla.json").read_text())["results"] == {"loss": 4.5}


def test_a_page_names_files_without_the_folders_of_the_machine(tmp_path, output):
    recipe = {"ett": str(tmp_path / "ETTm1.csv.gz"), "mixers": "softmax,gla/norm", "seeds": 3}
    recipe["data"] = f"{tmp_path / 'ETTh1.csv'},{tmp_path / 'ETTh2.csv'}"
    add_page(made_up_run(tmp_path / "regimes", recipe=recipe), output)
    kept = json.loads((output / "regimes.json").read_text())["config"]["recipe"]
    assert kept == recipe | {"ett": "ETTm1.csv.gz", "data": "ETTh1.csv,ETTh2.csv"}


def test_what_was_said_of_a_run_survives_its_repetition(tmp_path, output):
    run = made_up_run(tmp_path / "argmax", "argmax")
    add_page(run, output)
    page = output / "argmax.md"
    page.write_text(page.read_text().replace("## How", "## What it says\n\nFEM wins.\n\n## How"))
    add_page(run, output)
    said = page.read_text()
    parts = [
        said.index(part) for part in ("# A run", "FEM wins.", "## What was run", "A table.", "## How this was made")
    ]
    assert parts == sorted(parts)
    add_page(run, output)
    assert page.read_text() == said


def test_pictures_are_drawn_again_from_the_numbers_beside_them(output, capsys):
    row = {"by seed": "4.986, 4.967", "loss": 4.976}
    results = {"prior": "gla", "ablate": {"full": row, "-C,G,T,L": row, "-C/r8": row}}
    pages = {"ablate_old": ("ablate", results), "argmax_old": ("argmax", {"argmax": {}}), "made_up": ("none", {})}
    for name, (experiment, found) in pages.items():
        data = {"config": {"experiment": experiment, "recipe": {}}, "results": found}
        (output / f"{name}.json").write_text(json.dumps(data))
        (output / f"{name}.md").write_text(f"# {name}\n\n![losses]({name}_loss.png)\n")
    (output / "ablate_shown_elsewhere.json").write_text((output / "ablate_old.json").read_text())
    (output / "ablate_bare.json").write_text((output / "ablate_old.json").read_text())
    (output / "ablate_bare.md").write_text("# a page without pictures\n")
    assert redraw(output) == ["ablate_old_loss.png"]
    assert (output / "ablate_old_loss.png").read_bytes().startswith(b"\x89PNG")
    assert "argmax_old.json has no 'curves'; its pictures are left as they are" in capsys.readouterr().err


def test_the_index_links_what_was_run_and_says_what_runs_the_rest(tmp_path, output):
    (output / "layer_cpu.md").write_text("# Layers\n")
    (output / "layer_cpu.json").write_text(json.dumps({"environment": {}}))
    add_page(made_up_run(tmp_path / "mad-laptop", "mad"), output)
    sections = {title: text for title, _, text in (part.partition("\n") for part in index(output).split("\n## "))}
    assert "](mad_laptop.md)" in sections["MAD, six synthetic tasks (Table 1 of the paper)"]
    not_run = "Not run yet: `fem vision --profile deit-tiny --data FOLDER`."
    assert sections["Pictures (Table 3 of the paper)"].strip() == not_run
    assert "* [Layers](layer_cpu.md)" in index(output)


def test_forecasts_of_several_runs_join_in_table_4(tmp_path, output):
    recipe = {"heads": 8, "learning_rate": 0.001}
    for horizon, mse in ((96, 0.3), (192, 0.4), (336, 0.5), (720, 0.6)):
        row = {"data": "ETTh2", "horizon": horizon, "model": "dlinear", "mse": mse, "mses": [mse], "mae": 0.3}
        row |= {"seeds": [0], "lookback": 512, "parameters": 9, "cpu_seconds": 1.0}
        assert "0.450 (0.426)" not in index(output)
        add_page(made_up_run(tmp_path / f"etth2-{horizon}", "forecast", {"forecast": [row]}, recipe), output)
    assert "0.450 (0.426)" in index(output)
    row |= {"horizon": 96, "mse": 9.0}
    add_page(made_up_run(tmp_path / "other", "forecast", {"forecast": [row]}, recipe | {"epochs": 1}), output)
    assert "0.450 (0.426)" in index(output)


def test_a_page_takes_the_place_of_no_other(tmp_path, output):
    runs = [made_up_run(tmp_path / folder / "run") for folder in "ab"]
    with pytest.raises(ValueError, match=r"names of their own for their pages, got .*a/run and .*b/run"):
        add_pages(runs, output / "new")
    assert not (output / "new").exists()
    add_page(runs[0], output)
    with pytest.raises(ValueError, match=r"must not hold run\.md of another experiment, got one of 'ablate'"):
        add_page(made_up_run(tmp_path / "c" / "run", "argmax"), output)


def test_scores_stand_under_the_paper_s_row_and_only_there():
    recipe = {"suite": "paper", "beside": "340M FEM"}
    found = {"ours": {"config": {"recipe": recipe}, "results": {"eval": {"piqa": {"acc": 0.5}}}}}
    rows = {row["model"]: row for row in table2(found)}
    assert rows["340M FEM, ours"]["PIQA"] == "0.500"
    assert rows["340M FEM, ours"]["COPA"] is None
    assert rows["340M FEM, ours"]["average rank"] is None
    assert set(rows["340M GLA, ours"].values()) == {"340M GLA, ours", None}
    assert (rows["340M FEM, paper"]["average rank"], rows["340M FEM, paper"]["firsts"]) == ("1.81", 8)
    assert rows["340M FEM, paper"]["PIQA"] == "0.676"


@pytest.mark.parametrize("missing", ["report.md", "results.json", "config.json"])
def test_a_run_that_has_not_ended_is_refused_by_name(tmp_path, output, missing):
    run = made_up_run(tmp_path / "run")
    (run / missing).unlink()
    with pytest.raises(ValueError, match=f"runs must be folders of runs that have ended, got .* without {missing}"):
        add_pages([run], output / "new")
    assert not (output / "new").exists()


@pytest.mark.parametrize(
    "name, text, sentence",
    [
        ("config.json", b"\0\0", "cannot be read"),
        ("results.json", b'{"cut', "cannot be read"),
        ("results.json", b"[]", "holds no JSON object"),
        ("config.json", b"{}", "does not say which experiment"),
        ("report.md", b"\xff\xfe", "no text in UTF-8"),
        ("loss.png", None, "shows loss.png, which is not there"),
    ],
)
def test_a_broken_run_is_left_out_with_a_sentence(tmp_path, output, capsys, name, text, sentence):
    good, broken = (made_up_run(tmp_path / run) for run in ("good", "broken"))
    (broken / name).unlink()
    if text is not None:
        (broken / name).write_bytes(text)
    assert add_pages([broken, good], output) == 1
    said = capsys.readouterr()
    assert sentence in said.err
    assert said.err.count("note:") == 1
    assert (output / "good.md").exists()
    assert not (output / "broken.md").exists()


def test_damaged_numbers_of_an_earlier_page_are_left_out(tmp_path, output, capsys):
    (output / "old.json").write_text('{"config": ')
    add_pages([made_up_run(tmp_path / "good")], output)
    assert "old.json' cannot be read" in capsys.readouterr().err


def test_names_in_titles_and_tables_are_text(tmp_path):
    write_page(tmp_path, "[x](javascript:alert(1)) <script>\n# more", markdown_table([{"a": "b | <i>\nc", "n": 1}]))
    lines = (tmp_path / "report.md").read_text().splitlines()
    assert lines[0] == r"# \[x\](javascript:alert(1)) \<script\> \# more"
    assert lines[-1] == "| b &#124; &lt;i> c | 1 |"


def test_without_names_every_finished_run_is_taken(tmp_path, monkeypatch, output):
    monkeypatch.chdir(tmp_path)
    made_up_run(tmp_path / "runs" / "one")
    (made_up_run(tmp_path / "runs" / "two") / "results.json").unlink()
    made_up_run(tmp_path / "runs" / ".three-4")  # what a killed run leaves
    assert add_pages(None, output) == 1
    assert (output / "one.md").exists()
    assert not (output / "two.md").exists()


def test_a_folder_of_other_pages_is_left_alone(tmp_path, output, monkeypatch):
    run = made_up_run(tmp_path / "runs" / "notes")
    (output / "notes.md").write_text("mine")
    with pytest.raises(ValueError, match=r"output must not hold another notes\.md"):
        add_pages([run], output)
    (tmp_path / "README.md").write_text("# My project")
    with pytest.raises(ValueError, match=r"output must be a folder of results.*README.md of its own"):
        add_pages([run], tmp_path)
    assert (output / "notes.md").read_text() == "mine"
    assert (tmp_path / "README.md").read_text() == "# My project"
    monkeypatch.chdir(output)
    with pytest.raises(ValueError, match="runs must be named"):
        add_pages(None, output)


def test_a_training_is_no_page(tmp_path, output):
    (tmp_path / "train" / "checkpoint-5").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"got the training .*; fem eval --model"):
        add_page(tmp_path / "train", output)
