"""The map of the source names what is there, and all of it; docs/training.md tells every patch of another library.

A name of `fem/ops` stands for one thing.
"""

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
NAMED = set(re.findall(r"`((?:fem|research|tests|docs|benchmarks)/[\w/.]*)`", PAGE))


def test_every_path_that_the_map_names_is_there():
    assert len(NAMED) > 20
    for path in NAMED:
        assert (ROOT / path).exists(), path


def test_every_read_has_its_row_which_ends_with_its_definition():
    rows = [line.rstrip(" |") for line in PAGE.splitlines() if line.startswith("| ")]
    for folder in (ROOT / "fem" / "ops").iterdir():
        if folder.is_dir() and folder.name not in ("common", "__pycache__"):
            (row,) = (row for row in rows if f"`fem/ops/{folder.name}/`" in row)
            assert row.endswith(".py`"), folder.name


def test_every_part_of_the_package_is_on_the_map():
    for part in (ROOT / "fem").iterdir():
        if part.is_dir() and part.name != "__pycache__":
            assert f"fem/{part.name}/" in NAMED, part.name


def root_of(part: ast.expr) -> str | None:
    while isinstance(part, (ast.Attribute, ast.Subscript)):
        part = part.value
    return part.id if isinstance(part, ast.Name) else None


def patches(tree: ast.Module) -> bool:
    """Whether a file assigns to a part of what it imports, other than the environment, or gives an object a class."""
    imports = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {(name.asname or name.name).split(".")[0] for node in imports for name in node.names} - {"os"}
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.Call) and node.args and ast.unparse(node.func) in ("setattr", "mock.patch.object"):
            given = node.args[0]
            targets = [given.args[0] if isinstance(given, ast.Call) and given.args else given]
            if root_of(targets[0]) in names:
                return True
        for target in targets:
            if isinstance(target, (ast.Attribute, ast.Subscript)) and root_of(target) in names:
                return True
            if isinstance(target, ast.Attribute) and target.attr == "__class__":
                return True
    return False


def test_every_patch_stands_on_the_page():
    section = (ROOT / "docs" / "training.md").read_text().partition("## Patches of other libraries")[2]
    told = set(re.findall(r"`((?:fem|research)/[\w/]+\.py)`", section.partition("\n## ")[0]))
    files = [*(ROOT / "fem").rglob("*.py"), *(ROOT / "research" / "fem_research").rglob("*.py")]
    found = {path.relative_to(ROOT).as_posix() for path in files if patches(ast.parse(path.read_text()))}
    unseen = {"fem/train/titan/parallel.py"}  # it changes an object that it is given
    assert found | unseen == told


def test_no_name_of_the_reads_stands_twice():
    """But for a function in Triton, which has the name of its plain twin."""
    places = defaultdict(list)
    for path in (ROOT / "fem" / "ops").rglob("*.py"):
        places[path.name].append(str(path))
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
                in_triton = any(ast.unparse(mark) in ("triton.jit", "launched") for mark in node.decorator_list)
                places[node.name, in_triton].append(str(path))
    del places["__init__.py"]
    assert len(places) > 200
    assert [found for found in places.values() if len(found) > 1] == []
