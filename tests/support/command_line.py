"""`fem` with arguments, in this process: its exit status."""

import sys

import pytest

from fem import cli


def fem(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["fem", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return end.value.code
