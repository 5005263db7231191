"""The Triton kernels without a GPU: run by Triton's interpreter, each file in its own process."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from fem.functional import softmax_read

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


def test_softmax_attention_says_that_it_has_no_kernels_of_its_own():
    x = torch.randn(1, 3, 1, 4)
    with pytest.raises(ValueError, match="kernels for scans, not for softmax attention"):
        softmax_read(x, x, x, torch.ones(1, 4), backend="triton")
