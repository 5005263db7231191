"""`fem` with arguments, in this process."""

import sys

import pytest

from fem import cli


def fem(monkeypatch, *arguments):
    """The exit status."""
    monkeypatch.setattr(sys, "argv", ["fem", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return end.value.code
