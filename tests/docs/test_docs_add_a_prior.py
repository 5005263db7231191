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


def test_a_softmax_of_other_scores_decodes_by_these(page):
    """Token by token, without gradients: where the prior of attention has a path of its own."""
    layer = FreeEnergyMixer(FreeEnergyMixerConfig(n_embd=64, n_head=4, prior_type="cosine", use_conv=False))
    x = torch.randn(2, 9, 64)
    with torch.no_grad():
        for projection in (layer.prior.query, layer.prior.key):
            projection.weight.normal_()
        y, state = layer(x[:, :5], return_state=True)
        outputs = [y]
        for token in x[:, 5:].split(1, 1):
            y, state = layer(token, state=state, return_state=True)
            outputs.append(y)
        torch.testing.assert_close(torch.cat(outputs, 1), layer(x), rtol=1e-5, atol=1e-6)
    q, k = layer.prior.queries_and_keys(x, torch.arange(9))
    assert torch.einsum("bthd,bihd->bhti", q, k).abs().amax() <= layer.config.key_width**0.5 * 1.001
    with pytest.raises(ValueError, match="a softmax prior is normalised by definition"):
        FreeEnergyMixer(FreeEnergyMixerConfig(n_embd=64, n_head=4, prior_type="cosine", normalize=False))


def test_an_operator_deletes_masked_tokens_and_separates_documents(page):
    config = FreeEnergyMixerConfig(n_embd=64, n_head=4)
    layer = FreeEnergyMixer(config, prior=OperatorPrior(page["CausalConvolution"](config.fem_dim, 8)))
    x = torch.randn(1, 20, 64)
    keep = torch.rand(1, 20) > 0.4
    torch.testing.assert_close(layer(x, attention_mask=keep)[keep], layer(x[:, keep[0]])[0], rtol=1e-5, atol=1e-6)
    ids = torch.tensor([[0] * 9 + [1] * 11])
    apart = torch.cat([layer(x[:, :9]), layer(x[:, 9:])], 1)
    torch.testing.assert_close(layer(x, segment_ids=ids), apart, rtol=1e-5, atol=1e-6)


def test_an_operators_read_is_the_free_energy_of_its_weights(page):
    config = FreeEnergyMixerConfig(n_embd=64, n_head=4, use_conv=False)
    layer = FreeEnergyMixer(config, prior=OperatorPrior(page["CausalConvolution"](config.fem_dim, 8)))
    reading = layer.inspect(torch.randn(1, 9, 64))
    torch.testing.assert_close(reading.prior.sum(-1), torch.ones(1, 4, 8, 9), rtol=1e-5, atol=1e-6)
    assert (reading.mean <= reading.free_energy + 1e-6).all()


def test_what_an_operator_cannot_do_is_said_in_one_sentence(page):
    config = FreeEnergyMixerConfig(n_embd=64, n_head=4, use_conv=False)
    layer = FreeEnergyMixer(config, prior=OperatorPrior(page["CausalConvolution"](config.fem_dim, 8)))
    x = torch.randn(1, 9, 64)
    with pytest.raises(ValueError, match="keeps no state"):
        layer(x, return_state=True)
    with torch.no_grad():
        layer.value.weight.normal_()
        x[:, 8] *= 1e4
    with pytest.raises(ValueError, match="v spreads too far for an operator prior"):
        layer(x)
    shrinking = FreeEnergyMixer(config, prior=OperatorPrior(lambda x: x[:, 1:]))
    with pytest.raises(ValueError, match=r"op must map \(B, T, C\) to the same shape"):
        shrinking(torch.randn(1, 9, 64))
