"""A hundred thousand tokens through every prior with a state of fixed size."""

import pytest
import torch
from layers import FAMILIES, WIDTH, make_layer

from fem import PRIORS

SCANS = [name for name in FAMILIES if not name.startswith("softmax")]
CHUNK, CHUNKS = 500, 200


def stream(layer, dtype):
    """The last chunk's outputs, and the state's bytes after every chunk."""
    source, state, sizes = torch.Generator().manual_seed(5), None, []
    for _ in range(CHUNKS):
        x = torch.randn(1, CHUNK, WIDTH, generator=source, dtype=torch.float64).to(dtype)
        with torch.no_grad():
            y, state = layer(x, state=state, return_state=True)
        sizes.append(state.nbytes)
    return y.double(), sizes


@pytest.mark.slow
@pytest.mark.parametrize("family", SCANS)
def test_a_hundred_thousand_tokens_drift_by_less_than_1e_4(family):
    exact = make_layer(torch.float32, **FAMILIES[family]).double()
    y, sizes = stream(make_layer(torch.float32, **FAMILIES[family]), torch.float32)
    wanted, _ = stream(exact, torch.float64)
    assert (y - wanted).abs().max() <= 1e-4 * wanted.abs().max()
    assert len(set(sizes)) == 1


def test_every_prior_but_softmax_streams_here():
    assert {FAMILIES[name]["prior_type"] for name in SCANS} == set(PRIORS) - {"softmax"}
