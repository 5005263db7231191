"""The table of the configuration has every field, with the default that it has."""

import re
from dataclasses import MISSING, fields
from pathlib import Path

from fem import FreeEnergyMixerConfig

PAGE = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()


def test_every_field_is_in_the_table_with_its_default():
    shown = dict(re.findall(r"^\| `(\w+)` \| (\S+) \|", PAGE, re.MULTILINE))
    plain = lambda default: "required" if default is MISSING else f"`{default!r}`".replace("'", '"')  # noqa: E731
    assert shown == {field.name: plain(field.default) for field in fields(FreeEnergyMixerConfig)}
