"""A Python program in a process of its own: Triton takes its interpreter at its import or never, and the shape checks
of the tests break graphs of torch.compile."""

import os
import subprocess
import sys
from pathlib import Path


def printed(*command: str) -> str:
    """What `python *command` prints, which finds the modules of this folder and of this process."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    done = subprocess.run([sys.executable, "-W", "ignore", *command], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
