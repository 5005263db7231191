"""A layer of every prior as users run it on a card: checkpointed, compiled, on a side stream, captured, on another GPU.

python -m pytest -o addopts= tests/card/situations.py        on a machine with a card
"""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fem import PRIORS, FreeEnergyMixerConfig
from fem.doctor.checks import apart, built, replayed, side_stream, trained
from fem.functional import decay_scan

CARD = torch.device("cuda", 0)


def same(config, change, elsewhere: torch.device = CARD) -> str | None:
    """None where output and gradients of the changed layer, on `elsewhere`, equal the unchanged layer's."""
    sides = []
    for home, changed in ((CARD, lambda layer: layer), (elsewhere, change)):
        layer, x = built(config, home)
        sides.append(trained(layer, x, changed(layer)))
    return apart(*reversed(sides))


@torch.no_grad()
def captured(config) -> str | None:
    """The forward pass of one token, captured in a CUDA graph and replayed."""
    layer, x = built(config, CARD)
    return apart(*replayed(lambda: [layer(x[:, :1])], CARD))


GRAPHS = {"triton.cudagraphs": True, "graph_partition": False}
SITUATIONS = {
    "checkpointing": lambda config: same(config, lambda layer: lambda x: checkpoint(layer, x, use_reentrant=False)),
    "compile": lambda config: same(config, torch.compile),
    "CUDA graphs by compile": lambda config: same(config, lambda layer: torch.compile(layer, options=GRAPHS)),
    "side stream": lambda config: same(config, lambda layer: side_stream(CARD)(layer.__call__)),
    "CUDA graph": captured,
}
if torch.cuda.device_count() > 1:  # cuda:0 stays the current one
    SITUATIONS["second GPU"] = lambda config: same(config, lambda layer: layer, torch.device("cuda", 1))


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("situation", SITUATIONS)
def test_a_layer_computes_the_same_in_every_situation(situation, prior):
    assert SITUATIONS[situation](FreeEnergyMixerConfig(n_embd=64, n_head=2, prior_type=prior)) is None


def test_tokens_may_lie_two_to_the_31_numbers_from_the_first():
    """It needs 48 GiB."""
    decay = torch.full((1, 2**21 + 65, 1024), -0.1, dtype=torch.bfloat16, device=CARD)
    u = torch.zeros_like(decay)
    u[:, -65:] = 1.0
    wanted = decay_scan(decay[:, -65:].float(), u[:, -65:].float(), backend="plain")
    torch.testing.assert_close(decay_scan(decay, u)[:, -65:].float(), wanted, rtol=1e-2, atol=1e-2)
