"""Every command that the pages show exists, with the options that they show: of fem and of other programs."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer", reason="the command line needs the extra 'cli'")

from fem.cli import commands, load

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "research").rglob("*.md"))]
TYPED = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
OPTION = re.compile(r"(?<!\S)--[a-z][\w-]*")
COMMAND = re.compile(r"(?<!from )\bfem(?:\.cli)? ([a-z]+)\b([^#`\n|;&]*)")


def blocks(text: str) -> list[str]:
    return re.findall(r"```bash\n(.*?)```", text, re.DOTALL)


def lines(program: str) -> list[str]:
    """The lines of all pages that call a program, up to a comment."""
    code = "\n".join(block for page in TYPED for block in blocks(page.read_text().replace("\\\n", "")))
    return [line.partition("#")[0] for line in code.splitlines() if line.startswith(f"{program} ")]


def shown(page: Path) -> list[tuple[str, list[str]]]:
    """The commands in a page's code, and their options."""
    text = page.read_text().replace("\\\n", " ")
    code = blocks(text) + re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text)
    found = [match for part in code for match in COMMAND.findall(re.sub(r'"[^"]*"', "TEXT", part))]
    return [(name, OPTION.findall(rest)) for name, rest in found]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_commands_of_a_page_exist_with_their_options(page):
    for name, options in shown(page):
        assert name in commands(), f"fem {name}"
        known = {flag for parameter in load(name).params for flag in (*parameter.opts, *parameter.secondary_opts)}
        assert set(options) - {"--help"} <= known, f"fem {name}"


def test_commands_are_found_in_blocks_and_in_sentences():
    assert sum(len(shown(page)) for page in PAGES) > 15
    assert ("train", ["--recipe", "--micro-batch", "--output", "--resume"]) in shown(ROOT / "docs" / "training.md")


def test_the_arguments_of_fem_in_the_pages_are_of_their_kind():
    told = lines("fem")
    assert len(told) > 8
    for line in told:
        _, name, *arguments = shlex.split(line)
        load(name).make_context(name, arguments)


def test_torchrun_knows_what_the_pages_type_and_fem_train_takes_the_rest(monkeypatch):
    pytest.importorskip("transformers", reason="training needs the extra 'lm'")
    from torch.distributed.run import get_args_parser

    from fem.train import train

    ran = []
    monkeypatch.setattr(train, "run", lambda recipe, *_, **__: ran.append(recipe) or {"train": {}})
    told = [get_args_parser().parse_args(shlex.split(line)[1:]) for line in lines("torchrun")]
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


@pytest.mark.slow
def test_transformers_serve_knows_what_the_pages_type():
    pytest.importorskip("transformers", reason="it is one of its commands")
    told = [line for line in lines("transformers") if " serve " in line]
    assert told
    command = [shutil.which("transformers", path=Path(sys.executable).parent) or "transformers", "serve", "--help"]
    shown = subprocess.run(command, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert set(OPTION.findall("\n".join(told))) <= set(re.findall(r"--[a-z][\w-]*", shown.stdout))
