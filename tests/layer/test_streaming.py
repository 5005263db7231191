"""Twenty thousand tokens through every prior with a state of fixed size."""

import pytest
import torch
from layers import FAMILIES, WIDTH, make_layer, streamed
from own_priors import BoundedValues, CosinePrior, DoubleTurn

from fem import PRIORS, FreeEnergyMixer, FreeEnergyMixerConfig

SCANS = [name for name in FAMILIES if not name.startswith("softmax")]
CHUNK, CHUNKS = 500, 40


def trained(family, dtype):
    """A layer whose maps have the size of weights after training."""
    torch.manual_seed(0)
    layer = FreeEnergyMixer(FreeEnergyMixerConfig(n_embd=WIDTH, n_head=2, **FAMILIES[family]))
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.ndim == 2:
                parameter.mul_(6)
    return layer.to(dtype)


@torch.no_grad()
def stream(layer, dtype):
    """The last chunk's outputs, and the state's bytes after every chunk; one token of the sixth is an outlier."""
    source, state, sizes = torch.Generator().manual_seed(5), None, []
    for number in range(CHUNKS):
        x = torch.randn(1, CHUNK, WIDTH, generator=source, dtype=torch.float64).to(dtype)
        x[:, 300] += 300 * (number == 5)
        y, state = layer(x, state=state, return_state=True)
        sizes.append(state.nbytes)
    return y.double(), sizes


@pytest.mark.slow
@pytest.mark.parametrize("family", SCANS)
def test_twenty_thousand_tokens_drift_by_less_than_1e_4(family):
    """A rounding error of 2^-24 that every token adds would be 1.2e-3 by then."""
    y, sizes = stream(trained(family, torch.float32), torch.float32)
    wanted, _ = stream(trained(family, torch.float64), torch.float64)
    assert (y - wanted).abs().max() <= 1e-4 * wanted.abs().max()
    assert len(set(sizes)) == 1


@pytest.mark.parametrize("prior", ["mamba", "mamba_interactive"])
@pytest.mark.parametrize("spike", [100.0, 300.0, 1000.0])
@torch.no_grad()
def test_an_outlier_token_leaves_a_layer_exact(prior, spike):
    x = torch.randn(1, 120, WIDTH)
    x[:, 40] += spike
    got, wanted = (trained(prior, dtype)(x.to(dtype))[:, 41:] for dtype in (torch.float32, torch.float64))
    assert (got - wanted).abs().max() < 1e-5 * wanted.abs().max()


@pytest.mark.parametrize("prior", [CosinePrior, DoubleTurn, BoundedValues])
def test_an_own_softmax_prior_streams_as_it_reads_and_is_normalised(monkeypatch, prior):
    monkeypatch.setitem(PRIORS, prior.name, prior)
    layer = make_layer(torch.float32, prior_type=prior.name)
    x = torch.randn(1, 9, WIDTH)
    with torch.no_grad():
        y, _ = streamed(layer, x, [6, 1, 1, 1])
    torch.testing.assert_close(y, layer(x), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="a softmax prior is normalised by definition"):
        make_layer(prior_type=prior.name, normalize=False)


@pytest.mark.parametrize("fields", [{}, {"free_share": 0.5, "gate_rank": 4}, {"value_logexp_cap": 4.0}], ids=str)
@torch.no_grad()
def test_a_call_of_no_tokens_changes_no_stream(fields):
    """Before the first token, where a row has not begun, and after it."""
    layer = FreeEnergyMixer(n_embd=32, n_head=4, use_conv=False, **fields).eval()
    x, document = torch.randn(2, 3, 32), torch.full((2, 1), 5)
    _, state = layer(x[:, :0], return_state=True)
    first, state = layer(x[:, :1], state=state, return_state=True)
    nothing, state = layer(x[:, :0], state=state, return_state=True)
    second, state = layer(x[:, 1:2], state=state, return_state=True)
    third, _ = layer(x[:, 2:], segment_ids=document, state=state, return_state=True)
    assert nothing.shape == (2, 0, 32)
    torch.testing.assert_close(torch.cat([first, second], 1), layer(x[:, :2]))
    torch.testing.assert_close(third, layer(x[:, 2:]))  # another document than what came before
