"""Weight decay shrinks weights, and nothing whose zero means something."""

from functools import partial

import pytest
import torch
from layers import FAMILIES, make_layer
from torch.nn.functional import softplus
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.prune import l1_unstructured

import fem
from fem import FreeEnergyMixer, FreeEnergyMixerConfig
from fem.gates import Temperature
from fem.priors.mamba import InteractiveMambaPrior, SelectiveSSM

STEPS, RATE, DECAY = 200, 0.05, 0.1  # the shrinkage, e^-1, of 10,000 steps at 1e-3


def decay(model, groups):
    """AdamW on gradients of 0: what decay alone does."""
    optimiser = torch.optim.AdamW(groups, lr=RATE)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for _ in range(STEPS):
        optimiser.step()


def test_a_memory_of_512_tokens_and_a_sharp_beta_outlive_training():
    layer = FreeEnergyMixer(FreeEnergyMixerConfig(n_embd=32, n_head=4, prior_type="mamba"))
    torch.nn.init.constant_(layer.beta.theta, 4.0)
    beta, weight = layer.beta().mean().item(), layer.value.weight.norm().item()
    decay(layer, fem.parameter_groups(layer, DECAY))
    slowest = softplus(layer.prior.ssm.a).min() * softplus(torch.tensor(0.0))
    assert (torch.log(torch.tensor(2.0)) / slowest).item() == pytest.approx(512, rel=1e-3)  # the longest half-life
    assert layer.beta().mean().item() == pytest.approx(beta)
    assert layer.value.weight.norm().item() == pytest.approx(weight * (1 - RATE * DECAY) ** STEPS, rel=1e-3)


@pytest.mark.parametrize("family", [*fem.PRIORS, "softmax slim"])
def test_every_parameter_is_in_one_group_and_only_maps_decay(family):
    layer = make_layer(**FAMILIES[family])
    decayed, kept = (group["params"] for group in fem.parameter_groups(layer, 0.1))
    assert sorted(map(id, decayed + kept)) == sorted(map(id, layer.parameters()))
    linear = {id(m.weight) for m in layer.modules() if isinstance(m, torch.nn.Linear)}
    assert {id(p) for p in decayed} == linear
    assert layer.no_weight_decay() == {n for n, p in layer.named_parameters() if id(p) not in linear}


def test_other_trainers_find_their_marks():
    layer = make_layer(prior_type="mamba_interactive")
    marked = {id(p) for p in layer.parameters() if getattr(p, "_no_weight_decay", False)}
    generators = [m for m in layer.modules() if isinstance(m, (Temperature, SelectiveSSM, InteractiveMambaPrior))]
    assert marked == {id(m.get_parameter(name)) for m in generators for name in m.undecayed}
    assert len(marked) == 4


@pytest.mark.parametrize("made_by, parts", [
    (lambda pool, name: pool, 1), (weight_norm, 2), (partial(l1_unstructured, amount=0.5), 1)
])  # fmt: skip
def test_frozen_parameters_are_in_no_group_and_neither_a_pools_query_nor_what_makes_it_decays(made_by, parts):
    pool = made_by(fem.FreeEnergyPooling(16, 2), name="query")
    pool.read.value.requires_grad_(False)
    decayed, kept = ({id(p) for p in group["params"]} for group in fem.parameter_groups(pool, 0.1))
    queries = {id(p) for name, p in pool.named_parameters() if "query" in name and "read" not in name}
    assert len(queries) == parts
    assert queries <= kept - decayed
    assert not {id(p) for p in pool.read.value.parameters()} & (decayed | kept)
