"""Split rows on one process, which is nothing but the model; what split rows cannot be is said in a sentence."""

from __future__ import annotations

import pytest
import torch
from own_priors import MeanPrior
from test_engines import small_model, tokens
from torch import nn

from fem import FreeEnergyMixer, FreeEnergyMixerConfig
from fem.models.context import context_parallel, own_part
from fem.models.loss import next_tokens
from fem.priors import OperatorPrior


@pytest.mark.parametrize("prior", ["softmax", "gla"])
def test_one_part_is_the_whole_row_and_afterwards_the_model_is_as_before(prior, mesh):
    model, ids = small_model({"use_conv": True}, prior_type=prior), tokens(2, 9)
    wanted = model(ids).logits
    with context_parallel(model, mesh):
        assert torch.allclose(model(own_part(ids, mesh), use_cache=False).logits, wanted, atol=1e-5)
    assert torch.equal(model(ids).logits, wanted)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    model.generate(ids, max_new_tokens=2, pad_token_id=0)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"labels": tokens(1, 4)}, "pass shift_labels"),
        ({"position_ids": torch.arange(4)[None]}, "mark documents by segment_ids"),
        ({"use_cache": True}, "use_cache=False"),
        ({"shift_labels": next_tokens(tokens(1, 4)), "engine": "sdpa"}, "exact form"),
    ],
)
def test_what_a_part_cannot_be_given_is_refused(given, said, mesh):
    model, given = small_model(), dict(given)
    model.set_attn_implementation(given.pop("engine", "exact"))
    with context_parallel(model, mesh), pytest.raises(ValueError, match=said):
        model(tokens(1, 4), **given)


def layer(prior=None, **fields) -> FreeEnergyMixer:
    return FreeEnergyMixer(FreeEnergyMixerConfig(n_embd=16, n_head=2, **fields), prior)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (layer(causal=False), "causal=False"),
        (layer(OperatorPrior(lambda x: x.cumsum(1)), use_conv=False), "no state"),
        (layer(MeanPrior(FreeEnergyMixerConfig(n_embd=16, n_head=2))), "MeanPrior reads keys and values in a way of"),
        (nn.Sequential(layer(), nn.Linear(16, 16)), "Sequential"),
    ],
)
def test_a_model_that_cannot_read_parts_is_refused(model, said, mesh):
    with pytest.raises(ValueError, match=said), context_parallel(model, mesh):
        pass


def test_parts_have_one_length(mesh, monkeypatch):
    monkeypatch.setattr(type(mesh), "size", lambda self: 3)
    with pytest.raises(ValueError, match="10 tokens cannot be cut into 3 equal parts"):
        own_part(tokens(1, 10), mesh)
