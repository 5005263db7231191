"""The command line, output folders, pictures and optional packages."""

import json
import re
import signal
import subprocess
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

import pytest
from command_line import fem
from processes import printed
from typer.testing import CliRunner

from fem import __version__, cli, doctor, extras, provenance
from fem.commands import options
from fem.commands import train as train_command
from fem.doctor import card
from fem.train.recipe import TrainRecipe, differences
from fem_research.argmax import experiment as argmax
from fem_research.argmax import settings as argmax_settings

HELP = """
import sys
from fem import cli
for command in [None, *cli.commands()]:
    sys.argv = ["fem", *([command] if command else []), "--help"]
    try:
        cli.main()
    except SystemExit as ended:
        assert ended.code == 0, command
print({"torch", "transformers", "datasets", "matplotlib", "pandas"} & sys.modules.keys())
"""


def test_every_command_explains_itself_and_waits_for_no_library():
    """In an interpreter of its own, which has imported none of them yet."""
    shown = printed("-c", HELP)
    _, listing, *helps = shown.split("Usage: ")
    assert all(command in listing for command in cli.commands())
    assert len(helps) == len(cli.commands())
    assert shown.endswith("\nset()\n")


def test_without_the_research_package_its_commands_say_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(cli, "entry_points", lambda group: [])
    cli.commands.cache_clear()
    assert fem(monkeypatch, "trian") == 2
    cli.commands.cache_clear()
    said = capsys.readouterr().err
    assert "Did you mean 'train'?" in said
    assert "./research" in said


def test_the_version_is_printed(monkeypatch, capsys):
    assert fem(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"free-energy-mixer {__version__}\n"


def help_of(command, columns):
    return CliRunner().invoke(cli.app, [command, "--help"], env={"COLUMNS": str(columns)}).output


def test_every_field_of_a_recipe_is_an_option_with_its_default():
    for line in ("--learning-rate", "--validation-examples", "[default: 64]", "[default: 0.02]", "--paper", "--output"):
        assert line in help_of("argmax", 200)


@pytest.mark.parametrize(
    "arguments, wanted",
    [
        ([], argmax.ArgmaxRecipe()),
        (["--steps", "7"], argmax.ArgmaxRecipe(steps=7)),
        (["--paper"], argmax.ArgmaxRecipe(**argmax_settings.PAPER)),
        (["--paper", "--steps", "7"], argmax.ArgmaxRecipe(**argmax_settings.PAPER | {"steps": 7})),
    ],
)
def test_options_change_the_chosen_recipe_and_nothing_else(monkeypatch, tmp_path, arguments, wanted):
    ran = []
    monkeypatch.setattr(argmax, "run", lambda recipe, output: ran.append((recipe, output)))
    assert fem(monkeypatch, "argmax", "--output", str(tmp_path), *arguments) == 0
    assert ran == [(wanted, tmp_path)]


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["argmax", "--batch-size", "0"], "error: --batch-size must be positive, got 0.\n"),  # a field called batch
        (["doctor", "--gpu", "--only", "x"], f"error: --only must be from {', '.join(card.steps())}; got 'x'.\n"),
        (["doctor", "--only", "x"], "error: --only needs --gpu, whose steps it names, got 'x' without --gpu.\n"),
        (["doctor", "--output", "x"], "error: --output needs --gpu, whose page it holds, got 'x' without --gpu.\n"),
        (["train", "--steps=2", "--warmup-steps=5"], "error: --warmup-steps must be at most --steps = 2, got 5.\n"),
        (["train", "--resume", "yes"], "error: resume must be auto, or left out, got 'yes'.\n"),
        (["train", "--model-fields", "{bad"], "error: --model-fields must be a JSON object, got '{bad'.\n"),
    ],
)
def test_a_mistake_is_answered_by_one_sentence_and_status_2(monkeypatch, tmp_path, capsys, arguments, sentence):
    monkeypatch.chdir(tmp_path)
    assert fem(monkeypatch, *arguments) == 2
    assert capsys.readouterr().err == sentence
    assert list(tmp_path.iterdir()) == []


def test_what_changed_since_a_run_began_is_named_as_it_is_typed():
    changed = differences(asdict(TrainRecipe()), TrainRecipe(model='{"a": 1}', context=64, max_steps=9))
    said = options._as_typed(f"another recipe: {', '.join(changed)}.", TrainRecipe)
    wanted = '--model-fields ({} there, {"a": 1} here), --context (512 there, 64 here), --steps (1000 there, 9 here).'
    assert said == f"another recipe: {wanted}"


def test_help_shows_brackets_and_values_and_whole_lists_on_a_terminal_of_80_columns():
    shown = help_of("regimes", 200)
    assert "[mixer, SwiGLU]" in shown
    assert "[default: ]" not in shown
    assert "None" not in shown
    for command in ("regimes", "natural", "bench", "finetune"):
        assert "…" not in help_of(command, 80), command


@pytest.mark.parametrize(
    ("command", "said"),
    [("argmax", "to begin again: fem argmax --seed 3"), ("mad", "the same command goes on: fem mad --seed 3")],
)
@pytest.mark.parametrize(("sent", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_command_says_what_to_type(monkeypatch, capsys, command, said, sent, status):
    experiment = import_module(f"fem_research.{command}.experiment")
    monkeypatch.setattr(experiment, "run", lambda *_: signal.raise_signal(sent))
    assert fem(monkeypatch, command, "--seed", "3") == status
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL  # another one ends the shutdown without a traceback
    assert capsys.readouterr().err.splitlines()[-1].endswith(said)


def test_an_output_that_is_a_file_is_refused_before_anything_runs(monkeypatch, tmp_path, capsys):
    (tmp_path / "taken").write_text("mine")
    assert fem(monkeypatch, "argmax", "--output", str(tmp_path / "taken")) == 2
    assert "output must be a folder" in capsys.readouterr().err
    assert (tmp_path / "taken").read_text() == "mine"


def test_a_missing_package_is_named_with_the_extra_that_brings_it(monkeypatch, capsys):
    def missing(recipe, output):
        raise ModuleNotFoundError("No module named 'transformers'", name="transformers.trainer")

    monkeypatch.setattr(argmax, "run", missing)
    assert fem(monkeypatch, "argmax") == 2
    said = capsys.readouterr().err
    assert said.startswith("error: this needs transformers, which is not installed: pip install '.[lm]' in your copy")
    assert said.count("\n") == 1


def test_the_extra_of_other_libraries_brings_flash_linear_attention(monkeypatch):
    monkeypatch.setattr(extras, "extras", lambda: {"gpu": ["fla-core"], "baselines": ["flash-linear-attention"]})
    said = extras.missing_package(ModuleNotFoundError("No module named 'fla.layers'", name="fla.layers"))
    assert said.startswith("this needs fla, which is not installed: pip install '.[baselines]'")


def test_a_missing_module_of_our_own_is_no_missing_package():
    error = ModuleNotFoundError("No module named 'fem.nothing'", name="fem.nothing")
    with pytest.raises(ModuleNotFoundError, match="No module named"):
        extras.missing_package(error)


def test_extras_are_those_of_the_distribution():
    found = extras.extras()
    assert "typer" in found["cli"]
    assert "transformers" in found["lm"]
    assert not any("free-energy-mixer" in packages for packages in found.values())


def test_doctor_tells_versions_devices_and_packages(monkeypatch):
    monkeypatch.setattr(doctor, "extras", lambda: {"lm": ["torch", "transformers"], "gpu": ["torch", "not-there"]})
    shown = CliRunner().invoke(cli.app, ["doctor"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0
    for word in ("torch", "cpu", "because", "torch.compile", "missing not-there: pip install '.[gpu]'"):
        assert word in shown.output
    assert re.search(r"lm +│ +2 │ installed", shown.output)


def test_doctor_names_no_device_that_a_layer_does_not_run_on(monkeypatch):
    """Apple's has no float64, in which rotary angles are computed."""
    monkeypatch.setattr(doctor.torch.backends.mps, "is_available", lambda: True)
    assert "mps" not in [row["device"] for row in doctor.devices()]


WRITERS = [name for name in cli.commands() if name not in ("generate", "plan")]
NEEDS = {"train": "--data data.txt", "eval": "--model m --tasks t", "inspect": "--model m --text a", "doctor": "--gpu"}


@pytest.mark.parametrize("command", WRITERS)
def test_no_command_writes_to_a_folder_of_a_users_files(monkeypatch, tmp_path, capsys, command):
    """And says so before it computes anything."""
    monkeypatch.chdir(tmp_path)
    Path("data.txt").write_text("a text " * 1000)
    Path("mine").mkdir()
    files = {"README.md": "mine", "report.md": "mine"}
    for name, text in files.items():
        Path("mine", name).write_text(text)
    assert fem(monkeypatch, command, *NEEDS.get(command, "").split(), "--output", "mine") == 2
    sentence = r"error: output must be (empty or the folder of the same run|a folder of results), got 'mine'.*\n"
    assert re.fullmatch(sentence, capsys.readouterr().err)
    assert {path.name: path.read_text() for path in Path("mine").iterdir()} == files


def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "results.json"
    provenance.write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        provenance.write_json(path, {("no", "key"): 1})
    monkeypatch.setattr(provenance.os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        provenance.write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 1}


def test_doctor_looks_at_the_card_and_keeps_a_page(tmp_path):
    shown = CliRunner().invoke(cli.app, ["doctor", "--gpu", "--only", "rnn_decay", "--output", str(tmp_path)])
    assert shown.exit_code == 0, shown.output
    assert "checks pass" in shown.output
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["verdict"] in (tmp_path / "report.md").read_text()
    assert {name: step["ended"] for name, step in found["steps"].items()} == {"rnn_decay": "ok"}
    assert "token by token" in (tmp_path / "report.md").read_text().partition("## rnn_decay")[2]
    assert "Kernels of scans: triton " in (tmp_path / "report.md").read_text()


def test_doctor_stops_a_step_that_takes_too_long_and_keeps_what_it_had_found(tmp_path, monkeypatch):
    def hangs(command, **options):
        raise subprocess.TimeoutExpired(command, options["timeout"], b'{"check": "one", "result": "ok"}\n')

    monkeypatch.setattr(card.subprocess, "run", hangs)
    found = card.examine(tmp_path, "mamba,softmax")
    assert [step["ended"].startswith("stopped after") for step in found["steps"].values()] == [True, True]
    assert "2 of 2 checks pass" in found["verdict"]
    assert "not finished: mamba, softmax" in found["verdict"]


def test_a_default_warm_up_shrinks_to_fit():
    assert [TrainRecipe(max_steps=steps).warmup for steps in (1, 10, 1000)] == [0, 5, 50]
    assert TrainRecipe(max_steps=10, warmup_steps=10).warmup == 10


def test_a_finished_training_says_what_it_reached_and_what_comes_next(tmp_path):
    trained = {"train_loss": 2.5, "val_loss": 2.75}
    said = train_command.ending(trained, tmp_path, inspectable=True)
    assert "training loss 2.5000, validation loss 2.7500 nats per token" in said
    for command in ("generate", "inspect"):
        assert f"fem {command} --model {tmp_path}" in said
    assert "inspect" not in train_command.ending(trained, tmp_path, inspectable=False)
