"""The Triton kernels without a GPU: run by Triton's interpreter, and compiled for Hopper. Each in its own process."""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fem.functional import softmax_read
from fem.ops.common.tokens import read_tokens
from fem.ops.softmax.read import _allowed
from fem.ops.softmax.support import intervals

ROOT = Path(__file__).parents[2]
KERNEL_TESTS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "tests" / "ops").rglob("kernels_*.py"))
# The modules whose shapes are checked: all but those that hold the kernels themselves, which Triton reads as source.
CHECKED = ",".join(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in sorted((ROOT / "fem" / "ops").rglob("*.py"))
    if path.stem != "__init__" and (path.parent.name != "kernels" or path.stem.startswith("launch"))
)
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed (Linux only)")


def run(*command, **environment):
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    return subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True)


@needs_triton
@pytest.mark.parametrize(
    "file", sorted(path.relative_to(ROOT).as_posix() for path in Path(__file__).parent.rglob("kernels_*.py"))
)
def test_interpreted_kernels_equal_the_definition(file):
    options = ("-q", "-p", "no:cacheprovider", "-o", f"addopts=--jaxtyping-packages={CHECKED},beartype.beartype")
    done = run("-m", "pytest", file, *options, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", done.stdout).group(1)) > 5


MEASURE = """
import json, sys
sys.path.insert(0, "benchmarks")
from aot import SHARED_MEMORY
from kernels_aot import cases, measured
widths, wide = eval(sys.argv[1])
for case in cases(widths):
    if case[0].startswith("wide") != wide:
        continue
    result = measured(*case)
    assert result["shared"] <= SHARED_MEMORY, result
    print(json.dumps(result))
"""


def compiled(widths, wide):
    done = run("-c", MEASURE, repr((widths, wide)), TRITON_INTERPRET="0")
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check_compiled(*widths):
    results = compiled(widths, False)
    for result in results:
        assert result["spill"] <= (136 if "gradients" in result["kernel"] else 0), result
    for width in widths:
        plain, ours = (
            next(r for r in results if (r["kernel"], r["width"], r["bias"]) == (kernel, width, ""))
            for kernel in ("plain flash", "read_forward")
        )
        for instruction in ("HGMMA", "HMMA", "MUFU.EX2"):
            assert ours[instruction] == plain[instruction]


@needs_triton
def test_kernels_compile_for_hopper_and_the_forward_works_as_hard_as_plain_attention():
    check_compiled(128)


@needs_triton
@pytest.mark.slow
def test_kernels_of_every_width_compile_for_hopper():
    check_compiled(16, 32, 64, 256)


@needs_triton
@pytest.mark.slow
def test_kernels_of_wide_heads_compile_for_hopper():
    for result in compiled((64, 128, 256), True):
        assert result["spill"] <= (136 if "gradients" in result["kernel"] else 0), result


SCANS = """
import json, sys
sys.path.insert(0, "benchmarks")
from scan_kernels_aot import cases
for case in cases():
    print(json.dumps(case.measure()))
"""


@needs_triton
@pytest.mark.slow
def test_kernels_of_the_scans_compile_for_hopper():
    done = run("-c", SCANS, TRITON_INTERPRET="0")
    assert done.returncode == 0, done.stdout + done.stderr
    for result in map(json.loads, done.stdout.splitlines()):
        assert result["shared"] <= 227 * 1024, result
        assert result["spill"] <= (136 if "gradients" in result["kernel"] else 0), result


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter runs kernels on CPU tensors")
def test_the_triton_backend_says_where_it_runs():
    x = torch.randn(1, 3, 1, 4)
    with pytest.raises(ValueError, match="runs on CUDA tensors, got tensors on cpu; use backend='auto'"):
        softmax_read(x, x, x, torch.ones(1, 4), backend="triton")


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_intervals_are_the_support(data):
    batch, keys = 2, data.draw(st.integers(1, 12))
    queries, causal = data.draw(st.integers(1, keys)), data.draw(st.booleans())
    window = data.draw(st.none() | st.integers(1, 6))
    draw = lambda most: torch.tensor(data.draw(st.lists(st.integers(0, most), min_size=2 * keys, max_size=2 * keys)))  # noqa: E731
    mask = draw(1).view(batch, keys) if data.draw(st.booleans()) else None
    ids = draw(2).view(batch, keys) if data.draw(st.booleans()) else None
    tokens, _ = read_tokens((batch, keys), torch.device("cpu"), mask, ids)
    got = intervals(queries, keys, causal, window, tokens, torch.device("cpu"))
    inside = got.allowed(keys).expand(batch, -1, -1)
    if got.order is not None:
        inside = torch.zeros_like(inside).scatter(2, got.order[:, None].expand_as(inside), inside)
    want = _allowed(queries, keys, causal, window, tokens, torch.device("cpu"))
    want = torch.ones(queries, keys, dtype=torch.bool) if want is None else want
    if causal:
        want = want & torch.ones(keys, keys, dtype=torch.bool).tril()[keys - queries :]
    assert torch.equal(inside, want.expand(batch, 1, queries, keys)[:, 0])
    assert (got.first.diff(dim=1) >= 0).all()
    assert (got.end.diff(dim=1) >= 0).all()


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.integers(1, 8), st.sampled_from([2, 4]), st.sampled_from([4, 8]), st.booleans())
def test_rows_of_key_blocks_are_all_rows_that_see_them(keys, window, query_block, key_block, causal):
    seen = intervals(keys, keys, causal, window, None, torch.device("cpu"))
    inside = seen.allowed(keys)[0]
    table = seen.rows_of_key_blocks(keys, key_block, query_block)[0]
    for block, (begin, whole, whole_end, end) in enumerate(table.tolist()):
        columns = inside[:, block * key_block : (block + 1) * key_block]
        rows = columns.any(1).nonzero()[:, 0]
        assert begin <= rows.min()
        assert rows.max() < max(whole, whole_end, end)
        assert columns[whole:whole_end].all()
        assert begin % query_block == whole % query_block == whole_end % query_block == 0
