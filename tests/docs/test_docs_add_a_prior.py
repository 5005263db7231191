"""The examples of docs/add_a_prior.md, run as they stand."""

import re
from pathlib import Path

import pytest
import torch

from fem import PRIORS, FreeEnergyMixer, FreeEnergyMixerConfig
from fem.priors import OperatorPrior

PAGE = Path(__file__).parents[2] / "docs" / "add_a_prior.md"


@pytest.fixture(scope="module")
def page():
    """The page's names after its code has run, as one script."""
    names = {}
    torch.manual_seed(0)
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(block, names)
    yield names
    for name in ("fixed_decay", "cosine"):
        PRIORS.pop(name)


def test_the_new_prior_streams_like_any_other(page):
    whole = page["layer"](page["x"])
    torch.testing.assert_close(torch.cat([page["y"], page["rest"]], 1), whole, rtol=1e-5, atol=1e-6)


def test_an_operators_read_is_the_free_energy_of_its_weights(page):
    config = FreeEnergyMixerConfig(n_embd=64, n_head=4, use_conv=False)
    layer = FreeEnergyMixer(config, prior=OperatorPrior(page["CausalConvolution"](config.fem_dim, 8)))
    reading = layer.inspect(torch.randn(1, 9, 64))
    torch.testing.assert_close(reading.prior.sum(-1), torch.ones(1, 4, 8, 9), rtol=1e-5, atol=1e-6)
    assert (reading.mean <= reading.free_energy + 1e-6).all()
