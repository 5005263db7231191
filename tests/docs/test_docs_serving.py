"""What docs/serving.md and the FAQ tell to type: the Python runs on a checkpoint, other programs know their options."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers", reason="the language model needs the extra 'lm'")

from fem.models import FEMConfig, FEMForCausalLM

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "serving.md").read_text()
TYPED = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
OPTION = re.compile(r"(?<!\S)--[a-z][\w-]*")


def blocks(language: str, text: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def lines(program: str) -> list[str]:
    """The lines of all pages that call a program, up to a comment."""
    code = "\n".join(block for page in TYPED for block in blocks("bash", page.read_text().replace("\\\n", "")))
    return [line.partition("#")[0] for line in code.splitlines() if line.startswith(f"{program} ")]


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = FEMConfig(vocab_size=53, max_position_embeddings=64, mixer={"use_conv": False}, **sizes)
    FEMForCausalLM(config).save_pretrained(tmp_path / "runs" / "my-model")
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_python_of_the_page_runs_on_a_checkpoint(checkpoint, tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        names = {}
        for block in blocks("python", PAGE):
            if "tp_size=2" not in block:  # two processes: tests/models/test_engines_slow.py
                exec(block, names)
    finally:
        dist.destroy_process_group()
    assert sorted(len(answer.generated_tokens) for answer in names["answers"].values()) == [8, 8]
    assert all(parameter.grad is not None for parameter in names["model"].parameters())


def test_every_python_block_of_the_pages_is_python_and_what_it_imports_is_there():
    found = [block for page in TYPED for block in blocks("python", page.read_text())]
    assert len(found) > 20
    for block in found:
        compile(block, "page", "exec")
        exec("\n".join(re.findall(r"^(?:from \S+ )?import .*", block, re.MULTILINE)), {})


@pytest.mark.slow
def test_transformers_serve_knows_what_the_pages_type():
    told = [line for line in lines("transformers") if " serve " in line]
    assert told
    command = [shutil.which("transformers", path=Path(sys.executable).parent) or "transformers", "serve", "--help"]
    shown = subprocess.run(command, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert set(OPTION.findall("\n".join(told))) <= set(re.findall(r"--[a-z][\w-]*", shown.stdout))


def test_torchrun_knows_what_the_pages_type_and_fem_train_takes_the_rest(monkeypatch):
    from torch.distributed.run import get_args_parser

    from fem.cli import load
    from fem.train import train

    ran = []
    monkeypatch.setattr(train, "run", lambda recipe, *_, **__: ran.append(recipe) or {"train": {}})
    told = [get_args_parser().parse_args(line.split()[1:]) for line in lines("torchrun")]
    ours = [call for call in told if call.training_script not in ("fem.train.titan.cpu", "torchtitan.train")]
    assert ours
    assert len(told) > len(ours)  # `make test-titan` runs torchtitan's own command
    for call in ours:
        assert (call.module, call.training_script) == (True, "fem.cli")
        name, *arguments = call.training_script_args
        if name == "train":
            load(name).main(arguments, standalone_mode=False)
        else:
            load(name).make_context(name, arguments)
    assert ran


def test_the_arguments_of_fem_in_the_pages_are_of_their_kind():
    from fem.cli import load

    told = lines("fem")
    assert len(told) > 8
    for line in told:
        _, name, *arguments = shlex.split(line)
        load(name).make_context(name, arguments)
