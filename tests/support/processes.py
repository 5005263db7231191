"""A Python program in a process of its own: Triton takes its interpreter at its import or never, and the shape checks
of the tests break graphs of torch.compile."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")


def printed(*command: str, **environment: str) -> str:
    """What `python *command` prints, which finds the modules of this folder and of this process."""
    environment = os.environ | environment | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    how = {"env": environment, "stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, "-W", "ignore", *command], **how)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


def torchrun(processes: int, *command: str) -> str:
    """What `torchrun --nproc-per-node processes *command` prints."""
    return printed("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), *command)


def run_cases(file: Path, chosen: str) -> None:
    """The cases of a file whose names fit, in a process in which Triton interprets its kernels."""
    words = ["-m", "pytest", "-q", "-x", "-o", "addopts=", "-p", "no:cacheprovider", "-k", chosen, str(file)]
    printed(*words, TRITON_INTERPRET="1", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")  # plugins: a second of imports
