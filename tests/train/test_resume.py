"""Killed trainings: SIGKILL in a step and in a save, with one process and with two, then --resume auto."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs free-energy-mixer[lm]")

from trainings import assert_same_run, tiny, write_corpus

from fem.train.checkpoints import newest

SCRIPT = str(Path(__file__).parents[1] / "support" / "trainings.py")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def train(recipe, output, resume=False, death=None, processes=1):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    arguments = [asdict(recipe), str(output), resume, death]
    command = [sys.executable, *(torchrun if processes > 1 else []), SCRIPT, *map(json.dumps, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_killed_run_goes_on_bit_for_bit(tmp_path, processes):
    recipe = tiny(write_corpus(tmp_path / "data.jsonl"))
    whole = train(recipe, tmp_path / "whole", processes=processes)
    assert whole.returncode == 0, whole.stderr
    for death, last in ((["step", 8], "checkpoint-5"), (["save", 10], "checkpoint-5"), (["step", 11], "checkpoint-10")):
        output = tmp_path / "-".join(map(str, death))
        killed = train(recipe, output, death=death, processes=processes)
        assert killed.returncode == (-signal.SIGKILL if processes == 1 else 1), killed.stderr
        assert newest(output).name == last
        resumed = train(recipe, output, resume=True, processes=processes)
        assert resumed.returncode == 0, resumed.stderr
        assert_same_run(output, tmp_path / "whole", 12)


@pytest.mark.parametrize("room, refused", [(40_000, "model.safetensors"), (150_000, "optimizer.pt")])
def test_a_disk_that_fills_up_in_a_save_loses_nothing(tmp_path, room, refused):
    recipe = tiny(write_corpus(tmp_path / "data.jsonl"))
    assert train(recipe, tmp_path / "whole").returncode == 0
    files = {path.name: path.stat().st_size for path in (tmp_path / "whole" / "checkpoint-5").iterdir()}
    assert next(name for name in ("model.safetensors", "optimizer.pt") if files[name] > room) == refused
    full = train(recipe, tmp_path / "full", death=["room", room])
    assert full.returncode == 1
    sentence = full.stderr.strip().splitlines()[-1]
    assert "checkpoint-10 could not be saved" in sentence
    assert "checkpoint-5 is whole, --resume auto goes on from it." in sentence
    assert train(recipe, tmp_path / "full", resume=True).returncode == 0
    assert_same_run(tmp_path / "full", tmp_path / "whole", 12)
