"""Every kernel of the scans compiled as its launcher launches it, for cards that are not here."""

import ast
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from fem.experiments.doctor.without_card import CARDS, Compiled

ROOT = Path(__file__).parents[2]
FOLDERS = ("linear_attention", "channel_scan", "ssm", "decay_scan", "softmax", "common")
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed (Linux only)")

COMPILE = """
import json, sys
from contextlib import contextmanager
import torch
from triton.runtime import jit
from fem.experiments.doctor.launches import compile_all, few

torch.set_num_threads(1)
inside, run, device_of = [], jit.JITFunction.run, torch.cuda.device_of

@contextmanager
def on_device(tensor):
    inside.append(tensor)
    with device_of(tensor):
        yield
    inside.pop()

def run_there(kernel, *arguments, **options):
    assert inside, f"{kernel.__name__} is launched on whatever device is current"
    return run(kernel, *arguments, **options)

torch.cuda.device_of, jit.JITFunction.run = on_device, run_there
cards = json.loads(sys.argv[1])
for launch, cards in zip(few(), cards, strict=True):
    for found in compile_all([launch], cards):
        print(json.dumps(found._asdict()))
"""


def compiled(cards: list[list[str]]) -> list[Compiled]:
    """Each of the few launches for its cards."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", COMPILE, json.dumps(cards)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return [Compiled(**json.loads(line)) for line in done.stdout.splitlines()]


def functions() -> list[ast.FunctionDef]:
    """All functions that Triton compiles."""
    files = (path for folder in FOLDERS for path in (ROOT / "fem" / "ops" / folder / "kernels").glob("*.py"))
    nodes = (node for path in files for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef))
    return [node for node in nodes if any(ast.unparse(x) == "triton.jit" for x in node.decorator_list)]


def kernels() -> set[str]:
    """Those that no other one calls: those that are launched."""
    called = {ast.unparse(x.func) for node in functions() for x in ast.walk(node) if isinstance(x, ast.Call)}
    return {node.name for node in functions()} - called


def check(found: list[Compiled]) -> None:
    assert [f"{one.kernel} of {one.case} on {one.card}: {one.fault()}" for one in found if one.fault()] == []
    assert {one.kernel for one in found} == kernels()


@needs_triton
def test_every_kernel_compiles_fits_and_hardly_spills_as_it_is_launched():
    check(compiled([["sm_80"], ["sm_90"], [], ["gfx942"], ["sm_120"], ["sm_89"], ["sm_90", "gfx942"]]))


@needs_triton
@pytest.mark.slow
def test_every_kernel_compiles_fits_and_hardly_spills_on_every_card():
    check(compiled([list(CARDS)] * 7))


def assigned(node: ast.AST) -> set[str]:
    return {x.id for x in ast.walk(node) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)}


def pairs(node: ast.Assign) -> list[tuple[ast.expr, ast.expr]]:
    """Each name and what it is assigned."""
    (target,) = node.targets
    return list(zip(target.elts, node.value.elts)) if isinstance(node.value, ast.Tuple) else [(target, node.value)]


def test_no_kernel_does_what_triton_3_5_cannot_compile():
    """It refuses a loop that assigns to what it counts by ("Loop-carried variable _ has initial type int32 but is
    re-assigned"), and a function that returns None among others ("cannot convert None").
    """
    for function in functions():
        nodes = list(ast.walk(function))
        for loop in (x for x in nodes if isinstance(x, ast.For)):
            assert loop.target.id not in set().union(*map(assigned, loop.body)), ast.unparse(loop)
        given = (pair for x in nodes if isinstance(x, ast.Assign) for pair in pairs(x))
        absent = {ast.unparse(name) for name, value in given if isinstance(value, ast.Constant) and value.value is None}
        returned = {x.id for node in nodes if isinstance(node, ast.Return) for x in ast.walk(node) if hasattr(x, "id")}
        assert not absent & returned, function.name


def test_a_fault_is_what_does_not_compile_fit_or_stay_in_registers():
    fine = Compiled("case", "kernel", "sm_89", None, 255, 256, 99 * 1024)
    assert fine.fault() is None
    assert "bytes of shared memory" in fine._replace(shared=99 * 1024 + 1).fault()
    assert "spilt" in fine._replace(spill=257).fault()
    assert fine._replace(error="PTXASError: no").fault() == "PTXASError: no"
