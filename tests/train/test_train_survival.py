"""What a training promises beside its steps: how it ends, what its data are, who may write, what stops it."""

import errno
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from datetime import timedelta

import pytest
import torch

pytest.importorskip("transformers", reason="needs free-energy-mixer[lm]")

from chaos import damaged
from trainings import assert_same_run, losses, tiny, weights

from fem import cli
from fem.commands import train
from fem.train import distributed, frame, metrics, start, trainer, training
from fem.train.checkpoints import checkpoints, load_language_model, newest
from fem.train.distributed import Paused
from fem.train.signals import SaveAndStop

SLOW = pytest.mark.slow


@pytest.fixture
def copy(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "copy")


@pytest.fixture
def cut(copy):
    """The run as it is when a kill ends it after its second checkpoint."""
    shutil.rmtree(copy / "checkpoint-12")
    (copy / "results.json").unlink()
    return copy


def contents(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.suffix != ".lock"}


# Where it ends


def test_a_finished_run_is_left_as_it_is(copy, data, capsys):
    before = contents(copy)
    training.run(tiny(data), copy, resume=True)
    assert contents(copy) == before
    assert "is finished, 12 of 12 steps" in capsys.readouterr().err


def test_a_kill_before_the_results_costs_nothing_but_the_results(copy, whole, data):
    (copy / "results.json").unlink()
    training.run(tiny(data), copy, resume=True)
    wanted, found = (json.loads((folder / "results.json").read_text()) for folder in (whole, copy))
    assert found["train"] == wanted["train"]
    assert [path.name for path in checkpoints(copy)] == [path.name for path in checkpoints(whole)]


def test_more_steps_go_on_at_the_rate_of_the_longer_schedule(copy, data):
    training.run(tiny(data, max_steps=20, log_steps=1), copy, resume=True)
    rates = {line["step"]: line["learning_rate"] for line in losses(copy) if "learning_rate" in line}
    for step in (13, 16, 20):
        share = (step - 1 - 2) / (20 - 2)
        assert rates[step] == pytest.approx(1e-3 * (1 + math.cos(math.pi * share)) / 2)
    config = json.loads((copy / "config.json").read_text())
    assert config["recipe"]["max_steps"] == 20
    assert [(told["step"], told["event"]) for told in config["history"]] == [(12, "max_steps 12 -> 20")]


def test_fewer_steps_are_refused(copy, data):
    with pytest.raises(ValueError, match=r"another recipe: max_steps \(12 there, 11 here\)"):
        training.run(tiny(data, max_steps=11), copy, resume=True)


# Whose data


def test_moved_data_go_on(cut, whole, data, tmp_path):
    moved = shutil.copy(data, tmp_path / "elsewhere.jsonl")
    os.utime(moved, (1, 1))
    training.run(tiny(moved), cut, resume=True)
    assert_same_run(cut, whole, 12)


def test_changed_data_are_refused_unless_asked_for_and_then_recorded(cut, data, tmp_path):
    other = tmp_path / data.name
    other.write_text(data.read_text().replace("sun", "son"))
    os.utime(other, ns=(data.stat().st_atime_ns, data.stat().st_mtime_ns))
    assert other.stat().st_size == data.stat().st_size
    with pytest.raises(ValueError, match=r"data have changed since .*another data;.*--allow-changed-data"):
        training.run(tiny(other), cut, resume=True)
    training.run(tiny(other), cut, resume=True, allow_changed_data=True)
    (told,) = json.loads((cut / "config.json").read_text())["history"]
    assert told["step"] == 10
    assert told["event"].startswith("data taken as they are now")


def test_a_run_goes_on_with_its_own_data_after_others_were_taken_and_nothing_was_saved(cut, whole, data):
    (cut / "tokens" / "source.json").write_text('"others"')
    training.run(tiny(data), cut, resume=True)
    assert_same_run(cut, whole, 12)


def test_another_tokenizer_or_vocabulary_never_meets_the_old_tokens(data, whole, tmp_path):
    output = tmp_path / "run"
    shutil.copytree(whole / "tokens", output / "tokens")
    shutil.copytree(whole / "tokenizer", output / "tokenizer")
    shutil.copy(whole / "config.json", output)
    with pytest.raises(ValueError, match=r"another recipe: vocabulary \(300 there, 290 here\)"):
        training.run(tiny(data, vocabulary=290), output)
    (output / "config.json").unlink()
    with pytest.raises(ValueError, match="output must be empty or the folder of the same run"):
        training.run(tiny(data, tokenizer=str(whole / "tokenizer")), output)


@pytest.mark.parametrize("how", ["flipped", *(pytest.param(how, marks=SLOW) for how in ("cut", "zeroed"))])
def test_damaged_tokens_are_written_again(cut, whole, data, capsys, how):
    path = cut / "tokens" / "tokens.bin"
    wanted = bytearray(path.read_bytes())
    found = {"cut": wanted[:-4], "zeroed": bytes(len(wanted)), "flipped": bytes([wanted[0] ^ 1]) + wanted[1:]}[how]
    path.write_bytes(found)
    training.run(tiny(data), cut, resume=True)
    assert "the tokens in" in capsys.readouterr().err
    assert path.read_bytes() == wanted
    assert_same_run(cut, whole, 12)


# What is not finite


def poison(monkeypatch, step):
    """The gradient of one weight is NaN at this step."""
    original = trainer.TextTrainer.training_step

    def poisoned(self, model, *args):
        loss = original(self, model, *args)
        if self.state.global_step + 1 == step:
            next(model.parameters()).grad.view(-1)[0] = math.nan
        return loss

    monkeypatch.setattr(trainer.TextTrainer, "training_step", poisoned)


def test_a_gradient_of_nan_stops_the_run_and_names_the_step(data, tmp_path, monkeypatch):
    poison(monkeypatch, 10)
    with pytest.raises(ValueError, match=r"the gradient is nan at step 10; .*checkpoint-5 is whole"):
        training.run(tiny(data), tmp_path / "run")
    assert newest(tmp_path / "run").name == "checkpoint-5"


def test_weights_that_are_not_finite_never_become_a_checkpoint(data, tmp_path, monkeypatch):
    original = metrics.MetricsCallback.on_step_end

    def spoil(self, args, state, control, model=None, **given):
        original(self, args, state, control, **given)
        if state.global_step == 10:
            next(model.parameters()).data.view(-1)[0] = math.inf

    monkeypatch.setattr(metrics.MetricsCallback, "on_step_end", spoil)
    with pytest.raises(ValueError, match="at step 10"):
        training.run(tiny(data, eval_steps=50), tmp_path / "run")
    assert newest(tmp_path / "run").name == "checkpoint-5"


# What stops it


@pytest.mark.parametrize(
    "name, code",
    [
        ("SIGTERM", 75),
        *(pytest.param(*case, marks=SLOW) for case in (("SIGUSR1", 75), ("SIGHUP", 75), ("SIGINT", 130))),
    ],
)
def test_a_signal_saves_at_the_end_of_the_step(data, whole, tmp_path, monkeypatch, name, code):
    def send(self, args, state, control, **_):
        if state.global_step == 6:
            os.kill(os.getpid(), signal.Signals[name])

    before = signal.getsignal(signal.Signals[name])
    with monkeypatch.context() as patch:
        patch.setattr(metrics.MetricsCallback, "on_step_begin", send)
        with pytest.raises(Paused, match=f"stopped by {name}; step 7 of 12 is saved") as stopped:
            training.run(tiny(data), tmp_path / "run")
    assert stopped.value.code == code
    assert signal.getsignal(signal.Signals[name]) is before
    assert newest(tmp_path / "run").name == "checkpoint-7"
    training.run(tiny(data), tmp_path / "run", resume=True)
    a, b = weights(tmp_path / "run", 12), weights(whole, 12)
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_ctrl_c_says_what_to_type(data, tmp_path, monkeypatch, capsys):
    words = ["train", "--data", str(data), "--output", str(tmp_path / "run"), "--context", "24", "--vocabulary", "300"]
    monkeypatch.setattr(sys, "argv", ["fem", *words])
    monkeypatch.setattr(SaveAndStop, "on_step_begin", lambda self, *a, **k: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 130
    last = capsys.readouterr().err.splitlines()[-1]
    assert re.fullmatch(rf"stopped by SIGINT; .* to go on: fem {' '.join(words)} --resume auto", last)


def test_the_default_process_group_has_the_timeout_of_the_recipe(monkeypatch):
    """On CPUs, transformers creates it with a timeout of half an hour."""
    told = []
    found = {"is_initialized": True, "get_rank": 0, "get_world_size": 2, "new_group": None}
    for name, value in found.items():
        monkeypatch.setattr(distributed.dist, name, lambda *_, value=value, **__: value)
    monkeypatch.setattr(distributed.dist.distributed_c10d, "_set_pg_timeout", told.append)
    distributed.Ranks(10)
    assert told == [timedelta(seconds=10)]


# Who writes


def test_two_trainings_never_write_into_one_folder(cut, whole, data):
    before = contents(cut)
    script = (
        "import sys, time; from pathlib import Path; from fem.train.integrity import one_writer\n"
        "with one_writer(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", script, str(cut)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match="another training writes to"):
            training.run(tiny(data), cut, resume=True)
        assert {**contents(cut), **before} == contents(cut)
    finally:
        holder.kill()
        holder.wait()
    training.run(tiny(data), cut, resume=True)
    assert_same_run(cut, whole, 12)


def test_a_folder_that_another_training_filled_in_the_meantime_is_kept(whole, data, tmp_path, monkeypatch):
    """Another process creates and fills the folder between our first check of it and our lock."""
    output = tmp_path / "run"
    mkdir = type(output).mkdir

    def overtaken(self, *args, **given):
        mkdir(self, *args, **given)
        if self == output:
            shutil.copytree(whole, output, dirs_exist_ok=True)

    monkeypatch.setattr(type(output), "mkdir", overtaken)
    with pytest.raises(ValueError, match="output holds checkpoint-12 already"):
        training.run(tiny(data), output)
    assert newest(output).name == "checkpoint-12"


# What is damaged


@pytest.mark.parametrize(
    "name, how", [("optimizer.pt", "flipped"), pytest.param("complete.json", "deleted", marks=SLOW)]
)
def test_a_damaged_checkpoint_falls_back_to_the_one_before(cut, whole, data, capsys, name, how):
    path = cut / "checkpoint-10" / name
    damaged(path, how, random.Random(0))
    training.run(tiny(data), cut, resume=True)
    told = capsys.readouterr().err
    assert len(re.findall(r"note: checkpoint-10 is damaged: .*; going on from checkpoint-5\.", told)) == 1
    assert not (cut / ".saving").exists()
    assert (cut / "damaged-checkpoint-10").is_dir()
    assert_same_run(cut, whole, 12)


@pytest.mark.parametrize("left", [b"\0" * 300, pytest.param(None, marks=SLOW)])
def test_a_damaged_config_comes_back_from_the_checkpoint(cut, whole, data, capsys, left):
    (cut / "config.json").unlink() if left is None else (cut / "config.json").write_bytes(left)
    training.run(tiny(data), cut, resume=True)
    assert "taken from checkpoint-10" in capsys.readouterr().err
    assert_same_run(cut, whole, 12)


def test_damaged_metrics_come_back_from_the_checkpoint(cut, whole, data):
    (cut / "metrics.jsonl").write_bytes(b"\0" * 100 + b"\n[1]\nnot json\n")
    training.run(tiny(data), cut, resume=True)
    assert_same_run(cut, whole, 12)


@pytest.mark.parametrize("name, text", [("config.json", '{"experiment": "mad"}'), ("config.json", '{"model_type": 1}')])
def test_another_experiment_s_folder_is_left_alone(tmp_path, data, name, text):
    (tmp_path / name).write_text(text)
    (tmp_path / "results.json").write_text("{}")
    before = contents(tmp_path)
    with pytest.raises(ValueError, match="output must not hold another experiment"):
        training.run(tiny(data), tmp_path)
    assert contents(tmp_path) == before


def test_results_of_an_unknown_run_are_left_alone(tmp_path, data):
    (tmp_path / "results.json").write_text("{}")
    with pytest.raises(ValueError, match="must be empty or the folder of the same run"):
        training.run(tiny(data), tmp_path)
    assert (tmp_path / "results.json").read_text() == "{}"


def test_a_disk_that_is_full_between_saves_is_told_with_what_is_left(data, tmp_path, monkeypatch):
    def full(self, step, **_):
        if step > 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(frame.Run, "log", full)
    told = (
        r"run' could not be written to: No space left on device; checkpoint-5 is whole, --resume auto goes on from it"
    )
    with pytest.raises(OSError, match=told):
        training.run(tiny(data), tmp_path / "run")


# Settings, and what changes the arithmetic from outside


@pytest.mark.parametrize(
    "field, value",
    [
        *(("clip", -1.0), ("clip", 0.0), ("warmup_steps", 13), ("warmup_steps", -1), ("learning_rate", 0.0)),
        *(("beta2", 1.0), ("weight_decay", -0.1), ("seed", -1), ("vocabulary", 10)),
        *(("comm_timeout", 0), ("context", 1)),
    ],
)
def test_settings_that_make_no_sense_are_refused(data, field, value):
    with pytest.raises(ValueError, match=f"{field} must"):
        tiny(data, **{field: value})


def test_the_nearest_preset_is_named(data, tmp_path):
    with pytest.raises(ValueError, match=r"preset must be one of .*got 'fem-sm-tny'; did you mean fem-sm-tiny\?"):
        training.run(tiny(data, preset="fem-sm-tny"), tmp_path / "run")


def test_an_unknown_model_field_is_named(data, tmp_path):
    with pytest.raises(ValueError, match=r"model_fields must be .*got 'hiden_size'; did you mean hidden_size\?"):
        training.run(tiny(data, model='{"hiden_size": 32}'), tmp_path / "run")
    with pytest.raises(ValueError, match=r"model_fields must leave the dtype to --dtype, got 'bfloat16'"):
        training.run(tiny(data, model='{"dtype": "bfloat16"}'), tmp_path / "run")
    with pytest.raises(ValueError, match=r"model_fields must be .*got 'temperature'"):  # transformers would drop it
        training.run(tiny(data, model='{"temperature": 0.5}'), tmp_path / "run")


def test_scaled_rotary_angles_are_a_model_field(data):
    scaled = '{"rope_parameters": {"rope_type": "linear", "factor": 2.0}}'
    assert training.model_config(tiny(data, model=scaled), 499).rope_parameters["factor"] == 2.0


@pytest.mark.parametrize(
    "changes", [{"preset": "no"}, {"field": "no"}, {"context": 9999}, {"model": '{"vocab_size": 8}'}]
)
def test_a_refused_training_leaves_nothing_behind(data, tmp_path, changes, as_users_run):
    with pytest.raises(ValueError):
        training.run(tiny(data, **changes), tmp_path / "runs" / "train")
    assert list(tmp_path.iterdir()) == []


def test_a_precision_from_the_environment_is_refused(data, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    with pytest.raises(ValueError, match="ACCELERATE_MIXED_PRECISION=bf16 would change the arithmetic"):
        training.run(tiny(data), tmp_path / "run")


def test_without_a_terminal_every_line_of_metrics_is_printed(data, tmp_path, capsys):
    training.run(tiny(data, max_steps=6), tmp_path / "run")
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("step ")]
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [int(line.split("/")[0][5:]) for line in said] == steps
    assert re.match(r"step 3/6, loss \d\.\d+, grad norm [\d.]+, [\d,]+ tokens/s, 0:00:0\d left", said[0])


def test_a_checkpoint_keeps_config_and_metrics_as_they_were(whole):
    config = json.loads((whole / "checkpoint-10" / start.COPY / "config.json").read_text())
    assert config["recipe"]["max_steps"] == 12
    lines = (whole / "checkpoint-10" / start.COPY / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["step"] == 10


# Strangers' files


def strange_model(whole, tmp_path, what):
    folder = shutil.copytree(newest(whole), tmp_path / "model")
    names = {"model": "config.json", "tokenizer": "tokenizer_config.json"}
    told = json.loads((folder / names[what]).read_text())
    told["auto_map"] = {
        "AutoConfig": "evil.Config",
        "AutoModelForCausalLM": "evil.Model",
        "AutoTokenizer": ["evil.T", None],
    }
    told |= {"model_type": "evil"} if what == "model" else {"tokenizer_class": "Evil"}
    (folder / names[what]).write_text(json.dumps(told))
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    return folder


@pytest.mark.parametrize("what", ["model", "tokenizer"])
def test_code_in_a_model_s_folder_is_never_run(whole, data, tmp_path, monkeypatch, what):
    folder = strange_model(whole, tmp_path, what)
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(ValueError, match=r"(model|tokenizer) .*brings code of its own: fem runs none"):
        load_language_model(folder)
    if what == "tokenizer":
        with pytest.raises(ValueError, match="brings code of its own: fem runs none"):
            training.run(tiny(data, tokenizer=str(folder)), tmp_path / "run")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "../model.safetensors", "/model.safetensors", 3])
def test_an_index_that_names_other_files_is_refused(whole, tmp_path, name):
    folder = shutil.copytree(newest(whole), tmp_path / "model")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ValueError, match=r"must (name only safetensors in its own folder|list the parts)"):
        load_language_model(folder)


def test_the_command_to_go_on_with_asks_for_the_launcher(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["fem", "train", "--data", "a b.txt"])
    alone = "fem train --data 'a b.txt' --resume auto"
    assert train.again() == alone
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert train.again() == f"{alone}, by the same launcher"
