"""Every command that the pages show exists, with the options that they show."""

import re
from pathlib import Path

import pytest

pytest.importorskip("typer", reason="the command line needs the extra 'cli'")

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "research").rglob("*.md"))]
COMMAND = re.compile(r"(?<!from )\bfem(?:\.cli)? ([a-z]+)\b([^#`\n|;&]*)")


def shown(page: Path) -> list[tuple[str, list[str]]]:
    """The commands in a page's code, and their options."""
    text = page.read_text().replace("\\\n", " ")
    code = re.findall(r"```bash\n(.*?)```", text, re.DOTALL) + re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text)
    found = [match for part in code for match in COMMAND.findall(re.sub(r'"[^"]*"', "TEXT", part))]
    return [(name, re.findall(r"(?<!\S)--[a-z][\w-]*", rest)) for name, rest in found]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_commands_of_a_page_exist_with_their_options(page):
    from fem.cli import commands, load

    for name, options in shown(page):
        assert name in commands(), f"fem {name}"
        known = {flag for parameter in load(name).params for flag in (*parameter.opts, *parameter.secondary_opts)}
        assert set(options) - {"--help"} <= known, f"fem {name}"


def test_commands_are_found_in_blocks_and_in_sentences():
    assert sum(len(shown(page)) for page in PAGES) > 15
    assert ("train", ["--recipe", "--micro-batch", "--output", "--resume"]) in shown(ROOT / "docs" / "training.md")
