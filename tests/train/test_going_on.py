"""A training that is killed, stopped or out of disk goes on to the same weights; what is not its own is refused."""

import errno
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from itertools import product
from pkgutil import resolve_name

import pytest
import torch
from chaos import Chaos, cases
from command_line import fem
from forked import Training, arguments
from processes import torchrun
from trainings import assert_same_run, assert_same_weights, losses, tiny, write_corpus

from fem.commands import train as command
from fem.train import metrics, train
from fem.train.checkpoints import checkpoints, newest
from fem.train.signals import Paused, SaveAndStop

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


# Killed and stopped


def die(number, owner, name, times):
    """kill -9, or another signal, when this process calls `name` of `owner` for the so manieth time."""
    owner = resolve_name(owner)
    original, calls = getattr(owner, name), iter(range(1, 1_000))

    def dying(*args, **given):
        if next(calls) == times:
            os.kill(os.getpid(), number)
        return original(*args, **given)

    setattr(owner, name, dying)


TRAINER = "fem.train.train:TextTrainer"
MOMENTS = {
    "in a step": (TRAINER, "training_step", 8),
    "in a save": (TRAINER, "_save_rng_state", 2),
    "before a rename": ("os", "replace", 7),
    "before its results": ("fem.train.train", "summary", 1),
    "before its tokens": ("fem.train.train", "write_tokens", 1),
}


@pytest.mark.parametrize("moment", ["in a save", *(pytest.param(m, marks=SLOW) for m in MOMENTS if m != "in a save")])
def test_a_killed_run_goes_on_bit_for_bit(data, whole, tmp_path, moment):
    ended = Training(tiny(data), tmp_path / "run", before=partial(die, signal.SIGKILL, *MOMENTS[moment])).end(300)
    assert ended.code == -signal.SIGKILL, ended.said
    train.run(tiny(data), tmp_path / "run", resume=True)
    assert_same_run(tmp_path / "run", whole, 12)
    assert (tmp_path / "run" / "results.json").exists()


def test_dropout_and_accumulation_resume_bit_for_bit(data, tmp_path):
    """In the second epoch, too: the order of rows is that of the whole run."""
    model = json.loads(tiny(data).model) | {"mixer": {"dropout": 0.2}}
    recipe = tiny(data, model=json.dumps(model), micro_batch=2, context=96, max_steps=32, save_steps=30)
    train.run(recipe, tmp_path / "one")
    assert train.load_rows(recipe, tmp_path / "one")[0].count < 30 * 4
    shutil.copytree(tmp_path / "one", tmp_path / "other")
    shutil.rmtree(tmp_path / "other" / "checkpoint-32")
    train.run(recipe, tmp_path / "other", resume=True)
    assert_same_run(tmp_path / "one", tmp_path / "other", 32)


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
        patch.setattr(metrics.Metrics, "on_step_begin", send)
        with pytest.raises(Paused, match=f"stopped by {name}; step 7 of 12 is saved") as stopped:
            train.run(tiny(data), tmp_path / "run")
    assert stopped.value.code == code
    assert signal.getsignal(signal.Signals[name]) is before
    assert newest(tmp_path / "run").name == "checkpoint-7"
    train.run(tiny(data), tmp_path / "run", resume=True)
    assert_same_weights(tmp_path / "run", whole, 12)


@SLOW
def test_a_sigterm_before_training_ends_the_process_whatever_it_does(data, tmp_path):
    """In a destructor Python drops exceptions, and so an exit."""
    ended = Training(tiny(data), tmp_path / "run", before=ask_in_a_destructor).end(300)
    assert ended.code == -signal.SIGTERM, ended.said
    assert not checkpoints(tmp_path / "run")


def ask_in_a_destructor():
    class Dying:
        def __del__(self):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1)

    build = train.build_model
    train.build_model = lambda *given: (Dying(), build(*given))[1]


def test_ctrl_c_says_what_to_type(data, tmp_path, monkeypatch, capsys):
    words = ["train", "--data", str(data), "--output", str(tmp_path / "run"), "--context", "24", "--vocabulary", "300"]
    monkeypatch.setattr(SaveAndStop, "on_step_begin", lambda self, *a, **k: os.kill(os.getpid(), signal.SIGINT))
    assert fem(monkeypatch, *words) == 130
    last = capsys.readouterr().err.splitlines()[-1]
    assert re.fullmatch(rf"stopped by SIGINT; .* to go on: fem {' '.join(words)} --resume auto", last)


def test_the_command_to_go_on_with_asks_for_the_launcher(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["fem", "train", "--data", "a b.txt"])
    alone = "fem train --data 'a b.txt' --resume auto"
    assert command.again() == alone
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert command.again() == f"{alone}, by the same launcher"


# A full disk


def test_a_full_disk_is_one_sentence_and_loses_no_checkpoint(data, tmp_path, monkeypatch):
    save, full = torch.save, OSError(errno.ENOSPC, "No space left on device")

    def fails_late(state, path, *args, **given):
        if "checkpoint-10" in str(path) and "optimizer" in str(path):
            raise full
        return save(state, path, *args, **given)

    monkeypatch.setattr(torch, "save", fails_late)
    with pytest.raises(OSError, match=r"checkpoint-10 could not be saved .*No space left.*checkpoint-5 is whole"):
        train.run(tiny(data), tmp_path)
    assert newest(tmp_path).name == "checkpoint-5"
    assert not (tmp_path / train.STAGING).exists()


def test_a_disk_that_is_full_between_saves_is_told_with_what_is_left(data, tmp_path, monkeypatch):
    def full(line, steps):
        if line["step"] > 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return ""

    monkeypatch.setattr(metrics, "in_words", full)
    told = r"run' could not be written to: No space left on device; checkpoint-5 is whole, --resume auto goes on"
    with pytest.raises(OSError, match=told):
        train.run(tiny(data), tmp_path / "run")


# Where it ends


def test_a_finished_run_is_left_as_it_is(copy, data, tmp_path, capsys):
    before = contents(copy)
    train.run(tiny(data), copy, resume=True)
    (other := tmp_path / data.name).write_text(data.read_text().replace("sun", "son"))
    with pytest.raises(ValueError, match="data have changed since"):
        train.run(tiny(other), copy, resume=True)
    assert contents(copy) == before
    assert "is finished, all of 12 steps" in capsys.readouterr().err


def test_a_kill_before_the_results_costs_nothing_but_the_results(copy, whole, data):
    (copy / "results.json").unlink()
    train.run(tiny(data), copy, resume=True)
    wanted, found = (json.loads((folder / "results.json").read_text()) for folder in (whole, copy))
    assert found["train"] == wanted["train"]
    assert list(map(contents, checkpoints(copy))) == list(map(contents, checkpoints(whole)))


def test_more_steps_go_on_at_the_rate_of_the_longer_schedule(copy, data):
    train.run(tiny(data, max_steps=20, log_steps=1), copy, resume=True)
    rates = {line["step"]: line["learning_rate"] for line in losses(copy) if "learning_rate" in line}
    for step in (13, 16, 20):
        share = (step - 1 - 2) / (20 - 2)
        assert rates[step] == pytest.approx(1e-3 * (1 + math.cos(math.pi * share)) / 2)
    assert json.loads((copy / "config.json").read_text())["recipe"]["max_steps"] == 20


# What is refused


@pytest.mark.parametrize(
    "changes, resume, sentence",
    [
        ({}, False, "output holds checkpoint-12 already; add --resume auto"),
        ({"learning_rate": 0.5}, True, r"another recipe: learning_rate \(0.001 there, 0.5 here\)"),
        ({"max_steps": 11}, True, r"another recipe: steps \(12 there, 11 here\)"),
        ({"vocabulary": 290}, True, r"another recipe: vocabulary \(300 there, 290 here\)"),
    ],
)
def test_a_run_is_not_overwritten(whole, data, changes, resume, sentence):
    before = contents(whole)
    with pytest.raises(ValueError, match=sentence):
        train.run(tiny(data, **changes), whole, resume)
    assert contents(whole) == before


def test_moved_data_go_on_and_changed_data_are_refused(cut, whole, data, tmp_path):
    other = tmp_path / data.name
    other.write_text(data.read_text().replace("sun", "son"))
    before = contents(cut / "tokens")
    with pytest.raises(ValueError, match=r"data have changed since .*another data; give another --output"):
        train.run(tiny(other), cut, resume=True)
    assert contents(cut / "tokens") == before
    moved = shutil.copy(data, tmp_path / "elsewhere.jsonl")
    os.utime(moved, (1, 1))
    train.run(tiny(moved), cut, resume=True)
    assert_same_run(cut, whole, 12)


def test_a_checkpoint_without_a_whole_file_is_named_and_the_one_before_goes_on(cut, whole, data):
    files = ("model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json", "rng_state.pth")
    for name, damage in product(files, ("cut off", "removed")):
        path = cut / "checkpoint-10" / name
        content = path.read_bytes()
        if damage == "removed":
            path.unlink()
        else:
            path.write_bytes(content[: len(content) // 2])
        with pytest.raises(ValueError, match=r"checkpoint-10' cannot be read, remove it to go on") as told:
            train.run(tiny(data), cut, resume=True)
        assert "\n" not in str(told.value), (name, damage)
        path.write_bytes(content)
    shutil.rmtree(cut / "checkpoint-10")
    train.run(tiny(data), cut, resume=True)
    assert_same_run(cut, whole, 12)


def test_data_that_were_given_up_leave_no_tokenizer(tmp_path, data, whole, monkeypatch):
    other, run = tmp_path / "other.txt", tmp_path / "run"
    other.write_text("zyxw vuts " * 400)
    with monkeypatch.context() as stopped:
        stopped.setattr(train, "identity", lambda *_: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            train.run(tiny(other), run)
    train.run(tiny(data), run)
    assert (run / "tokenizer/tokenizer.json").read_bytes() == (whole / "tokenizer/tokenizer.json").read_bytes()


def test_a_signal_that_is_ignored_stays_so():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as by nohup
    try:
        with SaveAndStop() as stop:
            signal.raise_signal(signal.SIGHUP)
        assert not stop.asked
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("name", ["tokens.bin", "ends.bin"])
def test_tokens_that_are_cut_off_are_refused_and_written_again(name, cut, whole, data):
    path = cut / "tokens" / name
    path.write_bytes(path.read_bytes()[:-24])
    with pytest.raises(ValueError, match="tokens' cannot be read, remove the folder to write them again: there"):
        train.run(tiny(data), cut, resume=True)
    shutil.rmtree(cut / "tokens")
    train.run(tiny(data), cut, resume=True)
    assert_same_run(cut, whole, 12)


@pytest.mark.parametrize(
    "name, text, sentence",
    [
        ("config.json", '{"experiment": "mad"}', "output must not hold another experiment"),
        ("config.json", '{"model_type": 1}', "output must not hold another experiment, .* such as a model's"),
        ("config.json", '{"experiment": "train", "recipe": {}}', "of an earlier one; choose another"),
        ("notes.txt", "mine", "must be empty or the folder of the same run"),
    ],
)
def test_a_folder_of_others_is_left_alone(tmp_path, data, name, text, sentence):
    (tmp_path / name).write_text(text)
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=sentence):
        train.run(tiny(data), tmp_path, resume=True)
    assert contents(tmp_path) == before


def test_an_output_in_the_folder_of_the_data_is_refused(data, tmp_path):
    shutil.copy(data, tmp_path)
    with pytest.raises(ValueError, match="output must lie outside the folder of the data"):
        train.run(tiny(tmp_path), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_two_trainings_never_write_into_one_folder(cut, whole, data):
    before = contents(cut)
    script = (
        "import sys, time; from pathlib import Path; from fem.train.checkpoints import one_writer\n"
        "with one_writer(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", script, str(cut)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match="another training writes to"):
            train.run(tiny(data), cut, resume=True)
        assert {**contents(cut), **before} == contents(cut)
    finally:
        holder.kill()
        holder.wait()
    train.run(tiny(data), cut, resume=True)
    assert_same_run(cut, whole, 12)


# Two processes


@SLOW
@pytest.mark.timeout(900)
def test_two_processes_train_the_same_model_as_one_and_one_goes_on(tmp_path):
    recipe = tiny(write_corpus(tmp_path / "data.jsonl"), validation_rows=5)  # no multiple of 2 processes
    train.run(recipe, tmp_path / "1")
    torchrun(2, "-m", "fem.cli", *arguments(recipe, tmp_path / "2", resume=False))
    torch.testing.assert_close(losses(tmp_path / "1"), losses(tmp_path / "2"), rtol=1e-4, atol=0)
    assert_same_weights(tmp_path / "1", tmp_path / "2", 12, within=1e-4)
    shutil.copytree(tmp_path / "2", tmp_path / "3")
    shutil.rmtree(tmp_path / "3" / "checkpoint-12")
    train.run(recipe, tmp_path / "3", resume=True)
    assert_same_weights(tmp_path / "2", tmp_path / "3", 12, within=1e-6)


@SLOW
@pytest.mark.parametrize("changes, said", [({"preset": "no"}, "--preset"), ({"field": "no"}, "every record")])
def test_a_mistake_is_one_sentence_of_a_process(tmp_path, changes, said):
    recipe = tiny(write_corpus(tmp_path / "data.jsonl"), **changes)
    ended = Training(recipe, tmp_path / "run", 2).end(300)
    assert ended.code == 1
    (error,) = {line for line in ended.said.splitlines() if line.startswith("error: ")}
    assert error.startswith(f"error: {said} must")


@SLOW
def test_two_processes_save_at_the_same_step_when_one_is_asked(tmp_path):
    recipe = tiny(write_corpus(tmp_path / "data.jsonl"), micro_batch=2)
    ended = Training(recipe, tmp_path / "run", 2, before=ask_the_second).end(300)
    assert "stopped by SIGTERM; step 5 of 12 is saved" in ended.said, ended.said
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["checkpoint-5"]


def ask_the_second():
    if os.environ["RANK"] == "1":
        die(signal.SIGTERM, TRAINER, "training_step", 5)


@SLOW
@pytest.mark.parametrize("way", ["compile", "checkpointing"])
def test_compiled_and_recomputed_training_tell_the_same_losses(tmp_path, way):
    if way == "compile" and not shutil.which("g++"):
        pytest.skip("torch.compile on a CPU needs g++")
    data = write_corpus(tmp_path / "data.jsonl")
    model = json.dumps(json.loads(tiny(data).model) | {"num_hidden_layers": 1})
    for name, changes in (("plain", {}), (way, {way: True})):
        ended = Training(tiny(data, max_steps=6, model=model, **changes), tmp_path / name).end()
        assert ended.code == 0, ended.said
    torch.testing.assert_close(losses(tmp_path / "plain"), losses(tmp_path / way), rtol=1e-4, atol=0)


@SLOW
@pytest.mark.timeout(900)
def test_what_make_chaos_kills_or_stops_goes_on_to_the_same_weights(tmp_path):
    """One case of every kind of end: nothing silent, no traceback, nothing lost."""
    chaos = Chaos(tmp_path, seed=1)
    one_each = {case.kind: case for case in cases(seed=1)}
    found = [chaos.run(number, case) for number, case in enumerate(one_each.values())]
    assert [case for case in found if case["outcome"] != "same"] == []
