"""The same training on two processes, compiled, and with activations recomputed; a model that its user shards."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="needs free-energy-mixer[lm]")

from forked import Training, arguments
from trainings import losses, tiny, weights, write_corpus

from fem.train.distributed import end_process_group

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def torchrun(*words):
    """Two fresh processes by torchrun's own command."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *words]
    here = os.pathsep.join(str(Path(__file__).parents[up] / folder) for up, folder in ((1, "support"), (0, "")))
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_two_processes_train_the_same_model_as_one(tmp_path):
    recipe = tiny(write_corpus(tmp_path / "data.jsonl"), max_steps=20, validation_rows=5)  # no multiple of 2 processes
    ended = Training(recipe, tmp_path / "1").end(300)
    assert ended.code == 0, ended.said
    torchrun("-m", "fem.cli", *arguments(recipe, tmp_path / "2", resume=False))
    one, two = (losses(tmp_path / name) for name in "12")
    assert len(one) == len(two)
    for a, b in zip(one, two):
        assert a == pytest.approx(b, rel=1e-4)
    a, b = (weights(tmp_path / name, 20) for name in "12")
    assert max((a[name] - b[name]).abs().max().item() for name in a) < 1e-4
    assert json.loads((tmp_path / "2" / "results.json").read_text())["train"]["step"] == 20


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Makes runs once: the number of processes to the run's recipe and folder."""
    data = write_corpus(tmp_path_factory.mktemp("data") / "data.jsonl")
    made = {}

    def run(processes):
        if processes not in made:
            recipe, output = tiny(data), tmp_path_factory.mktemp("whole") / "run"
            ended = Training(recipe, output, processes).end(300)
            assert ended.code == 0, ended.said
            made[processes] = recipe, output
        return made[processes]

    return run


def gone_on(recipe, whole, output, processes):
    """The run without its last checkpoint, resumed to its end."""
    shutil.copytree(whole, output)
    shutil.rmtree(output / "checkpoint-12")
    (output / "results.json").unlink()
    ended = Training(recipe, output, processes, resume=True).end(300)
    assert ended.code == 0, ended.said
    return output


def apart(one, other):
    a, b = weights(one, 12), weights(other, 12)
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


@pytest.mark.parametrize("first, then", [(1, 4), (2, 1), (4, 2)])
def test_local_data_go_on_with_another_number_of_processes(finished, tmp_path, first, then):
    recipe, whole = finished(first)
    output = gone_on(recipe, whole, tmp_path / "run", then)
    assert apart(output, whole) < 1e-6
    for a, b in zip(losses(output), losses(whole), strict=True):
        assert a == pytest.approx(b, rel=1e-4)


@pytest.mark.parametrize("changes", [{"preset": "no"}, {"batch_size": 3}, {"field": "no"}])
def test_a_mistake_is_said_once_by_all_processes(tmp_path, changes):
    recipe = tiny(write_corpus(tmp_path / "data.jsonl"), **changes)
    ended = Training(recipe, tmp_path / "run", 2).end(300)
    assert ended.code == 1
    assert [line.split(" must")[0] for line in ended.said.splitlines() if line.startswith("error: ")] == [
        {"preset": "error: --preset", "batch_size": "error: --batch-size", "field": "error: data.jsonl, record 1"}[name]
        for name in changes
    ]


@pytest.mark.parametrize("way", ["compile", "checkpointing"])
def test_compiled_and_recomputed_training_tell_the_same_losses(tmp_path, way):
    if way == "compile" and not shutil.which("g++"):
        pytest.skip("torch.compile on a CPU needs g++")
    recipe = tiny(write_corpus(tmp_path / "data.jsonl"), max_steps=6)
    recipe = replace(recipe, model=json.dumps(json.loads(recipe.model) | {"num_hidden_layers": 1}))
    for name, changes in (("plain", {}), (way, {way: True})):
        ended = Training(replace(recipe, **changes), tmp_path / name).end()
        assert ended.code == 0, ended.said
    for a, b in zip(losses(tmp_path / "plain"), losses(tmp_path / way), strict=True):
        assert a == pytest.approx(b, rel=1e-4)


def sharded():
    """Run by torchrun: every weight sharded over the processes, twenty steps, against one unsharded copy."""
    import copy

    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.fsdp import FSDPModule, fully_shard
    from torch.distributed.tensor import DTensor

    from fem.models import FEMConfig
    from fem.train.model import build_model

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 88}
    config = FEMConfig(vocab_size=101, **sizes, layer_priors=["softmax", "gla"])
    alone = build_model(config, 0).train()
    model = copy.deepcopy(alone)
    for block in model.model.layers:
        fully_shard(block)
    fully_shard(model)
    assert isinstance(model, FSDPModule)
    assert all(isinstance(block, FSDPModule) for block in model.model.layers)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    optimizers = [torch.optim.AdamW(m.parameters(), 3e-3) for m in (alone, model)]
    draw = torch.Generator().manual_seed(1)
    for _ in range(20):
        ids = torch.randint(101, (2 * world, 24), generator=draw)
        segments = (torch.arange(24) > 9).long().expand_as(ids)
        mine = slice(2 * rank, 2 * rank + 2)
        for m, optimizer, rows in ((alone, optimizers[0], slice(None)), (model, optimizers[1], mine)):
            loss = m(input_ids=ids[rows], labels=ids[rows], segment_ids=segments[rows]).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)
            optimizer.step()
    found = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        wanted = alone.state_dict()
        assert found.keys() == wanted.keys()
        assert max((found[name] - wanted[name]).abs().max().item() for name in wanted) < 1e-4


def test_fsdp2_shards_every_weight_and_trains_as_one_process():
    torchrun(__file__)


if __name__ == "__main__":
    sharded()
    end_process_group()
