"""A wrong option of an experiment is one sentence that names it as it is typed, before anything is read or written."""

import shlex
from dataclasses import fields
from importlib import import_module

import pytest
from command_line import fem

pytest.importorskip("transformers", reason="needs free-energy-mixer[lm]")

from fem_research.commands import EXPERIMENTS

WRONG = {  # by command: what is typed, and how the sentence begins
    "ablate": {
        "--mixers attention,GLA": "--mixers must be from FEM, attention+CLT, ",
        "--mixers 'full +X'": "--mixers must be rows from full; -G; ",
        "--mixers ''": "--mixers and --learning-rates must name at least one each",
        "--mixers full-norm": "the softmax prior is normalised by definition; leave out '-norm'",
        "--prior nothing": "--prior must be one of softmax, ",
        "--learning-rates fast": "--learning-rates must be numbers",
        "--learning-rates 0.001,0": "--learning-rates must be above 0, got '0.001,0'",
        "--mlp wide": "--mlp must be one of narrowed, kept; got 'wide'.",
        "--seed -1": "--seed must not be negative, got -1.",
        "--context 1": "--context must be at least 2 tokens, of which one predicts, got 1.",
        "--vocabulary 256": "--vocabulary must be at least 257, got 256.",
    },
    "argmax": {
        "--heads 7": "--heads must divide --channels = 64, got --heads = 7.",
        "--train-examples 3": "--train-examples must fill one batch of 32, got 3.",
        "--tokens 1": "--tokens must be at least",
        "--heads 1 --channels 1 --test-examples 1": "--validation-examples and --test-examples must hold at "
        "least 2 maxima, got 1000 and 1 of one channel.",
        "--enough nan": "--enough must be",
        "--learning-rate 1e300": "--learning-rate must be below 1e+36, got 1e+300.",
        "--seed 4294967296": "--seed must be below 2^32, got 4294967296.",
    },
    "bench": {
        "--profile phone": "--profile must be one of laptop, gpu, paper; got 'phone'.",
        "--parts read,write": "--parts must be from ",
    },
    "demo": {
        "--heads 3": "--heads must divide --width = 128, got 3.",
        "--context 8": "--context must be at least 24 tokens for the picture, got 8.",
        "--vocabulary 256": "--vocabulary must be at least 257, got 256.",
        "--text-file nowhere.txt": "--text-file must be a file that exists, got 'nowhere.txt'.",
    },
    "eval": {
        "--tasks piqa": "--model must be given",
        "--model m": "--tasks must be given",
        "--model m --suite other": "--suite must be one of paper",
        "--model m --tasks a --include-path /no/where": "--include-path must be a folder",
        "--model m --tasks a --include-path /": "--include-path needs --allow-code: ",
        "--model m --tasks a --beside 9B": "--beside must be a row of Table 2",
        "--model m --tasks a --seed -1": "--seed must not be negative, got -1.",
    },
    "finetune": {
        "--heads 5": "--heads must divide --width = 96, got 5.",
        "--context 1": "--context must be at least 2 tokens, of which one predicts, got 1.",
        "--architecture llama --heads 1": "--heads must be even for llama, got 1.",
        "--architecture llama --heads 32": "--heads must divide width / 2 = 48, got 32.",
        "--mixers original,FEM": "--mixers must be attention and some of attention, attention+G, attention+LTG/r4, "
        "attention+LTG, got 'original,FEM'.",
    },
    "forecast": {
        "": "--data must name at least one CSV file, got none; give --data PATH.",
        "--data nowhere.csv": "--data must be a CSV file (.csv or .csv.gz), got no such file: 'nowhere.csv'.",
        "--horizon soon": "--horizon must be a positive number, or several with commas, got 'soon'.",
        "--mixers transformer": "mixer must be a prior",
        "--mixers attention/conv": "--mixers must have no short convolution (/conv) here, got",
        "--baseline-lookback 0": "--baseline-lookback must be a positive number, or several",
        "--dtype float16": "--dtype must be one of float32, bfloat16; got 'float16'.",
        "--profile phone": "profile must be one of laptop, paper; got 'phone'.",
    },
    "mad": {
        "--profile desktop": "--profile must be one of",
        "--tasks copying": "--tasks must be from",
        "--initialisations zero": "--initialisations must be from",
        "--mixers softmax,attentive": "mixer must be",
        "--mixers ''": "--mixers must name at least one mixer",
        "--mixers fla:Hyena": "mixer must be one of fla:",
        "--mixers softmax,fla:DeltaNet": "--mixers ",
        "--profile recall --tasks compression": "--tasks must be from in-context-recall; got 'compression'",
        "--learning-rates 0.1,-1": "--learning-rates must be numbers of 0 or more",
        "--learning-rates 0": "--learning-rates must be above 0",
        "--learning-rates 1e300": "--learning-rates must be numbers of 0 or more, below 1e+36, with commas",
        "--weight-decays nan": "--weight-decays must be numbers of 0 or more",
    },
    "plan": {
        "--gpus 512 --context 128 --tokens 1024": "a step has 8 rows of 128 tokens, which 512 groups of GPUs "
        "cannot share; lower --gpus = 512 or --micro = 1, or raise --tensor = 1 or --rows-over = 1.",
        "--gpus 6 --tensor 4": "--gpus must be a multiple of --tensor = 4 times --rows-over = 1, got 6",
        "--size tiny --tensor 8": "--tensor must divide the number of heads, got 8",
        "--context 100": "--context must divide the",
        "--rows-over 8 --context 4": "--context must be a multiple of --rows-over = 8, got 4",
    },
    "regimes": {
        "--tasks peaks": "--tasks must be from ",
        "--tasks ett-events": "the task ett-events needs its data: give --ett FILE.",
        "--tasks speakers": "the task speakers needs its data: give --play FILE.",
        "--tasks peak --ett ETTm1.csv": "--ett is data that none of the tasks reads",
        "--tasks peak,bags --mixers pool:max": "--mixers such as pool:mean pool a set; they need --tasks of bags and",
        "--initialisation best": "--initialisation must be",
        "--tasks peak --mixers attention --heads 5": "n_head must divide n_embd",
        "--tasks peak --mixers FEM --mlp-width 1": "softmax+CLTG has 3,560 parameters more than its baseline, ",
        "--tasks speakers --mixers attention --play nowhere.txt": "",
    },
    "vision": {
        "--patch-size 3": "--patch-size must divide --image-size = 8, got 3.",
        "--channels 2": "--channels must be 1 (grey) or 3 (RGB), got 2.",
        "--weight-decay inf": "--weight-decay must be below 1e+36, got inf.",
        "--mixup 0.8": "--mixup = 0.8 and --cutmix = 0.0 need --recipe = deit, got plain.",
        "--recipe deit": "--recipe deit needs --channels = 3 and an even --batch-size, got 1 and 64.",
        "--stream": "--stream needs a dataset of the hub (OWNER/NAME), got --data = 'digits'.",
        "--min-area 0": "--min-area must lie in (0, 1], got 0.0.",
        "--data .": "--data must hold pictures",
    },
}


@pytest.mark.parametrize("command, typed", [(command, typed) for command in WRONG for typed in WRONG[command]])
def test_a_wrong_option_is_one_sentence_before_anything_runs(monkeypatch, tmp_path, capsys, command, typed):
    monkeypatch.chdir(tmp_path)
    assert fem(monkeypatch, command, *shlex.split(typed)) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {WRONG[command][typed]}"), said
    assert said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [name for name, of in EXPERIMENTS.items() if "workers" in of.options])
def test_no_sweep_has_no_workers(monkeypatch, tmp_path, capsys, command):
    monkeypatch.chdir(tmp_path)
    assert fem(monkeypatch, command, "--workers", "0") == 2
    assert "workers" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def recipe(command):
    module, _, name = f"fem_research.{EXPERIMENTS[command].recipe}".rpartition(".")
    return getattr(import_module(module), name)


COUNTS = [(name, field.name) for name in EXPERIMENTS for field in fields(recipe(name)) if field.type in (int, "int")]


@pytest.mark.parametrize("command, count", COUNTS)
def test_no_count_of_an_experiment_is_negative(command, count):
    with pytest.raises(ValueError, match=f"{count} must "):
        recipe(command)(**{count: -1})
