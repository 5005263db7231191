"""Tables of pages: every field of the configuration with its default, what starting points cost, what priors can do;
every equation has a test, and the numbers of its example are what the library computes.
"""

import math
import re
import sys
from dataclasses import MISSING, fields
from pathlib import Path

import pytest
import torch

from fem import FreeEnergyMixer, FreeEnergyMixerConfig
from fem.models import FEMConfig
from fem.models.engines.obstacles import obstacle_to_pages, obstacle_to_states
from fem.theory import free_energy, hidden_temperature, kl_gap, posterior, posterior_mean

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS / "figures"))

import matrix  # noqa: E402

PAGE, EQUATIONS, FAQ = ((DOCS / name).read_text() for name in ("configuration.md", "equations.md", "faq.md"))
EXAMPLE = torch.tensor([[0.6, 0.3, 0.1], [0.0, 1.0, 3.0]]).double()  # p and v
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


def test_the_faq_says_how_large_a_scans_state_is():
    said = re.search(r"`gla` D \(2 d/H \+ 1\), `rnn_softmax` and `rnn_decay` (\d) d, `mamba` (\d) d times", FAQ)
    for prior, rank in {"linear": 0, "gla": 0, "rnn_softmax": 1, "rnn_decay": 1, "mamba": 16}.items():
        config = FreeEnergyMixerConfig.matched(64, 4, prior_type=prior)
        state = FreeEnergyMixer(config)(torch.randn(1, 3, 64), return_state=True)[1]
        wide = int(said[1 if rank == 1 else 2]) * rank * config.fem_dim
        assert sum(x.numel() for x in state.memory.values()) == (wide or 64 * (2 * config.fem_dim // 4 + 1))


def test_the_table_of_priors_is_what_was_found_by_trying():
    assert matrix.table() in (DOCS / "limits.md").read_text()


def tables():
    """The tables of the page, each a list of rows of cells; a bar within code is no border."""
    for lines in re.findall(r"(?:^\|.*\n)+", EQUATIONS, re.MULTILINE):
        rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines.splitlines()]
        yield [rows[0], *rows[2:]]


def test_every_statement_names_its_test_and_the_test_is_there():
    stated = [table for table in tables() if table[0][-1] in ("test", "tests")]
    assert sum(len(table) - 1 for table in stated) > 40
    for header, *rows in stated:
        for row in rows:
            assert len(row) == len(header), row
            assert re.search(r"`T::\w+`|`tests/[\w/]*test_\w+\.py`|the same", row[-1]), row
    theory = (ROOT / "tests" / "theory" / "test_theory.py").read_text()
    for name in set(re.findall(r"T::(\w+)", EQUATIONS)) - {"name"}:
        assert f"def test_{name}(" in theory, name
    for path in re.findall(r"`(tests/[\w/]+\.py)`", EQUATIONS):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("row", next(tables())[1:], ids=lambda row: f"beta = {row[0]}")
def test_the_example_of_three_tokens_is_what_the_library_computes(row):
    beta = math.log1p(math.exp(1.8)) if row[0] == "1.953" else float(row[0])
    q = " ".join(f"{share:.3f}" for share in posterior(*EXAMPLE, beta))
    numbers = (read(*EXAMPLE, beta).item() for read in (free_energy, kl_gap, posterior_mean))
    found, gap, mean = (f"{number:.3f}" for number in numbers)
    assert row[1:] == [found, gap, q, mean]


def test_half_way_is_the_hidden_temperature_that_the_page_says():
    assert f"F({hidden_temperature(*EXAMPLE, 0.5, 1.953).item():.3f})" in EQUATIONS
