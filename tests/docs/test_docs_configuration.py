"""The table of fields has every field with its default; that of starting points says what each costs."""

import json
import re
from dataclasses import MISSING, fields
from pathlib import Path

import torch

from fem import FreeEnergyMixer, FreeEnergyMixerConfig
from fem.models import FEMConfig
from fem.models.engines.support import obstacle, obstacle_to_states

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "configuration.md").read_text()
START = re.compile(
    r"^\| (?:attention: )?`(\.\w+\(.*\))` \| ([\d,]+) \| ([\d,]+) \| (\d+) \| (\w+, \d+) \| (.*) \|$", re.M
)


def test_every_field_is_in_the_table_with_its_default():
    shown = dict(re.findall(r"^\| `(\w+)` \| (\S+) \|", PAGE, re.MULTILINE))
    plain = lambda default: "required" if default is MISSING else f"`{default!r}`".replace("'", '"')  # noqa: E731
    assert shown == {field.name: plain(field.default) for field in fields(FreeEnergyMixerConfig)}


def test_what_a_starting_point_costs_is_counted_and_its_time_is_of_a_layer_as_large():
    found = START.findall(PAGE)
    assert [call.partition("(")[0] for call, *_ in found] == [*[".matched"] * 3, *[".slim"] * 2, ".split"]
    for call, *shown in found:
        layer = FreeEnergyMixer(eval(f"FreeEnergyMixerConfig{call}")).eval()
        parameters = sum(p.numel() for p in layer.parameters())
        with torch.no_grad():
            short, long = (layer(torch.randn(1, tokens, 512), return_state=True)[1] for tokens in (2, 12))
        cache, spare = divmod(long.nbytes - short.nbytes, 10)
        assert not spare
        width = long.memory["value"].shape[-1]
        assert shown == [f"{parameters:,}", f"{cache:,}", str(width), engines(layer.config), train_step(parameters)], (
            call
        )


def engines(mixer: FreeEnergyMixerConfig) -> str:
    """Who serves the layer from an engine's cache, and the head size of that cache."""
    given = {name: getattr(mixer, name) for name in ("use_lse", "use_temperature", "use_outer_gate", "use_conv")}
    given |= {"gate_rank": mixer.gate_rank, "free_share": mixer.free_share}
    config = FEMConfig(hidden_size=512, num_attention_heads=8, num_hidden_layers=1, mixer=given)
    assert config.mixer_configs() == [mixer]
    assert obstacle_to_states(config) is None or not mixer.use_conv
    return f"{'all' if obstacle(config) is None else 'vLLM'}, {config.head_dim}"


def train_step(parameters: int) -> str:
    """Over attention's, of the layer with this many parameters that was timed."""
    cases = json.loads((ROOT / "research" / "results" / "layer_cpu.json").read_text())["results"]["bench"]
    timed = {
        case["size"]["time"]: [case["results"]["attention"], *case["results"].values()]
        for case in cases
        if (case["part"], case["size"]["width"], case["size"]["heads"]) == ("layer", 512, 8)
    }
    ratios = [
        next((f"{row['train_s'] / rows[0]['train_s']:.2f}" for row in rows if row["parameters"] == parameters), None)
        for _, rows in sorted(timed.items())
    ]
    return ", ".join(ratios) if all(ratios) else "not measured"
