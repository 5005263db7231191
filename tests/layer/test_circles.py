"""No circle of imports in the library, at the head of a module or inside a function: read from the syntax tree."""

import ast
from pathlib import Path

import fem

ROOT = Path(fem.__file__).parent


def modules():
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), ast.parse(path.read_text())


def imports_of(name, tree, known):
    """Names of the library's modules that the module imports, wherever the import stands."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} imports by a relative name"
            below = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            found |= {path if path in known else node.module for path in below.values()}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            found |= {arg.value for arg in node.args if isinstance(arg, ast.Constant)}
    return {target for target in found & known if target != name}


def circles(graph):
    """Groups of modules that reach each other, by Tarjan's algorithm."""
    index, low, stack, groups = {}, {}, [], []

    def visit(node):
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in graph[node]:
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            group = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(group) > 1:
                groups.append(sorted(group))

    for node in graph:
        if node not in index:
            visit(node)
    return groups


def test_a_circle_is_found():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]


def test_no_module_of_the_library_imports_itself_over_others():
    trees = dict(modules())
    graph = {name: imports_of(name, tree, trees.keys()) for name, tree in trees.items()}
    graph["fem"] = set()  # the door: every name in it is loaded when a user asks for it
    assert circles(graph) == []
