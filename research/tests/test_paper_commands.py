"""Every command of docs/paper.md, run at toy size: it ends, and leaves its folder with a page that has numbers."""

import importlib.util
import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers", reason="needs free-energy-mixer[lm]")
pytest.importorskip("PIL", reason="needs free-energy-mixer[vision]")

from command_line import fem
from PIL import Image
from trainings import write_corpus
from waves import waves

from fem.train.tokenizer import train_tokenizer
from fem_research.bench import cases
from fem_research.mad import settings as mad

PAGE = Path(__file__).parents[2] / "docs" / "paper.md"
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT = "--context 16 --batch-size 2 --steps 2 --warmup-steps 1 --validation-rows 2 --eval-steps 1 --save-steps 2 "
TEXT += "--dtype float32 --micro-batch 1"
TOY = {
    "argmax": "--tokens 8 --channels 16 --train-examples 16 --validation-examples 8 --test-examples 8 --batch-size 8 "
    "--steps 2 --eval-every 1",
    "mad": "--learning-rates 1e-3 --weight-decays 0 --workers 1",
    "train": TEXT,
    "vision": "--image-size 16 --patch-size 8 --width 24 --layers 1 --heads 2 --epochs 1 --batch-size 4 --workers 0 "
    "--validations 1 --dtype float32",
    "forecast": "--horizon 5 --lookback 24 --baseline-lookback 12,23 --width 16 --layers 1 --heads 2 --epochs 1 "
    "--baseline-steps 2 --baseline-stride 40",
    "bench": "--seconds 1e-9",
}


def commands():
    """The commands of the page, without torchrun."""
    block = re.search(r"```bash\n(.*?)```", PAGE.read_text(), re.DOTALL)[1].replace("\\\n", "")
    found = []
    for line in block.splitlines():
        if line and not line.startswith("#"):
            words = shlex.split(line)
            found.append(words[words.index("fem.cli" if words[0] == "torchrun" else "fem") + 1 :])
    return found


COMMANDS = commands()


def test_the_page_has_a_command_for_every_experiment():
    assert {words[0] for words in COMMANDS} == {*TOY, "eval"}


def pictures(folder):
    draw = np.random.default_rng(0)
    for split, count in (("train", 4), ("val", 2)):
        for name in ("a", "b"):
            (folder / split / name).mkdir(parents=True)
            for index in range(count):
                pixels = draw.integers(256, size=(20, 20, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / split / name / f"{index}.png")
    return folder


def series(folder):
    """Files by their published names, as short as their splits allow."""
    waves(300, 21).to_csv(folder / "weather.csv", index=False)
    waves(300, 137).drop(columns="date").to_csv(folder / "solar_AL.txt", index=False, header=False)
    return f"{folder / 'weather.csv'},{folder / 'solar_AL.txt'}"


def ready(name, words, tmp_path, monkeypatch):
    """The command's words at toy size, with data that are made up here; `None` where it cannot run here, and why."""
    words = [*words, *shlex.split(TOY[name])]
    if name == "mad":
        tiny = {"width": 32, "batch": 4, "test_examples": 4, "checkpoints": 1, "bfloat16": False}
        for profile in ("paper", "paper-one"):
            one = (mad.Setting("memorization", {"vocab_size": 11, "seq_len": 8}, 8, 2),)
            small = replace(mad.PROFILES[profile], settings=one, training=mad.Training(heads=2, warmup=0.0, **tiny))
            monkeypatch.setitem(mad.PROFILES, profile, small)
    if name == "bench":
        small = [
            replace(case, size=cases.Size(1, 16, 64, 4), layers=1)
            for case in cases.PROFILES["paper"]
            if case.part in ("table5", "gpt2") and case.dtype == "float32"
        ]
        monkeypatch.setitem(cases.PROFILES, "paper", small)
    if name == "train":
        corpus = write_corpus(tmp_path / "text.jsonl", 40)
        train_tokenizer(corpus.read_text().splitlines(), 300).save_pretrained(tmp_path / "tokenizer")
        words += ["--data", str(corpus), "--tokenizer", str(tmp_path / "tokenizer")]
        other = "--model" in words
        if other:  # fla's need a card: the one of Table 2 that transformers has
            words[words.index("--model") + 1] = "diffllama"
        fields = SIZES | ({"num_key_value_heads": 2, "intermediate_size": 64} if other else {})
        words += ["--model-fields", json.dumps(fields)]
    if name == "vision":
        if importlib.util.find_spec("timm") is None:
            return None, "needs free-energy-mixer[deit]: make test-deit"
        if "--stream" in words:
            return None, "research/tests/test_deit.py reads a stream"
        words[words.index("FOLDER")] = str(pictures(tmp_path / "pictures"))
    if name == "forecast":
        if importlib.util.find_spec("neuralforecast") is None:
            return None, "needs free-energy-mixer[forecast]"
        words[words.index("--data") + 1] = series(tmp_path)
    if name == "eval":
        return None, "research/tests/test_eval.py scores made-up tasks"
    return words, ""


@pytest.mark.slow
@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(words[:4]))
def test_a_command_of_the_page_leaves_a_whole_run(words, tmp_path, monkeypatch, capsys):
    name, output = words[0], tmp_path / "run"
    if name == "eval":
        pytest.skip("research/tests/test_eval.py scores made-up tasks")
    toy, why = ready(name, words, tmp_path, monkeypatch)
    if toy is None:
        pytest.skip(why)
    assert fem(monkeypatch, *toy, "--output", str(output)) == 0
    shown = capsys.readouterr().out
    lines = [line for line in shown.splitlines() if str(tmp_path) not in line]  # a folder's name may be long
    assert max(map(len, lines), default=0) <= 80
    if name == "train":
        assert (output / "checkpoint-2" / "model.safetensors").exists()
        assert len((output / "metrics.jsonl").read_text().splitlines()) >= 2
        return
    assert {"config.json", "results.json", "metrics.jsonl", "report.md"} <= {path.name for path in output.iterdir()}
    page = (output / "report.md").read_text()
    assert f"`fem {name} " in page
    assert re.search(r"\| .*\d.* \|", page), "a table with a number"
    assert str(tmp_path) not in page
