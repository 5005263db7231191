"""Tables of pages: every field of the configuration with its default, what starting points cost, what priors can do."""

import re
import sys
from dataclasses import MISSING, fields
from pathlib import Path

import pytest
import torch

from fem import FreeEnergyMixer, FreeEnergyMixerConfig
from fem.models import FEMConfig
from fem.models.engines.obstacles import obstacle_to_pages, obstacle_to_states

DOCS = Path(__file__).parents[2] / "docs"
sys.path.insert(0, str(DOCS / "figures"))

import matrix  # noqa: E402

PAGE = (DOCS / "configuration.md").read_text()
WRITTEN = dict(re.findall(r"^\| ([\w -]+) \| `(\.\w+\(512, 8.*?\))` \|", PAGE, re.MULTILINE))
COUNTED = {name: counts for name, *counts in re.findall(r"^\| (.+?) \| ([\d,]+) \| ([\d,]+) \| (.+?) \|", PAGE, re.M)}


def test_every_field_is_in_the_table_with_its_default():
    shown = dict(re.findall(r"^\| `(\w+)` \| (\S+) \|", PAGE, re.MULTILINE))
    plain = lambda default: "required" if default is MISSING else f"`{default!r}`".replace("'", '"')  # noqa: E731
    assert shown == {field.name: plain(field.default) for field in fields(FreeEnergyMixerConfig)}


def test_every_starting_point_is_counted():
    assert len(WRITTEN) > 5
    assert WRITTEN.keys() == COUNTED.keys()


@pytest.mark.parametrize("name", WRITTEN)
def test_what_a_starting_point_costs_is_counted(name):
    layer = FreeEnergyMixer(eval(f"FreeEnergyMixerConfig{WRITTEN[name]}")).eval()
    parameters = sum(p.numel() for p in layer.parameters())
    with torch.no_grad():  # caches without room for more
        short, long = (layer(torch.randn(1, tokens, 512), return_state=True)[1] for tokens in (2, 7))
    cache, rest = divmod(long.nbytes - short.nbytes, 5)
    assert not rest
    assert COUNTED[name] == [f"{parameters:,}", f"{cache:,}", engines(layer.config)]


def engines(mixer: FreeEnergyMixerConfig) -> str:
    """Who serves the layer from an engine's cache, and the head size of that cache."""
    given = {name: getattr(mixer, name) for name in ("use_lse", "use_temperature", "use_outer_gate", "use_conv")}
    given |= {"gate_rank": mixer.gate_rank, "free_share": mixer.free_share}
    config = FEMConfig(hidden_size=512, num_attention_heads=8, num_hidden_layers=1, mixer=given)
    assert config.mixer_configs() == [mixer]
    assert obstacle_to_states(config) is None or not mixer.use_conv
    return f"{'all' if obstacle_to_pages(config) is None else 'vLLM'}, {config.head_dim}"


def test_the_table_of_priors_is_what_was_found_by_trying():
    assert matrix.table() in (DOCS / "limits.md").read_text()
