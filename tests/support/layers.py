"""Small layers in which every parameter matters, for the tests of the layer."""

from itertools import accumulate

import torch

from fem import PRIORS, FreeEnergyMixer, FreeEnergyMixerConfig
from fem.priors import OperatorPrior

WIDTH, HEADS, TIME = 32, 4, 13

FAMILIES = {
    **{name: {"prior_type": name} for name in PRIORS},
    "softmax grouped": {"prior_type": "softmax", "n_kv_head": 2},
    "softmax window": {"prior_type": "softmax", "window": 4},
}
# Gates know nothing of the prior: one prior of each kind of state has slim ones.
FAMILIES |= {f"{name} slim": {"prior_type": name, "gate_rank": 2} for name in ("softmax", "mamba")}
FAMILIES |= {
    "gla gates per head": {"prior_type": "gla", "gate_rank": 0},
    "gla scalar": {"prior_type": "gla", "decay": "scalar"},
    "gla channel": {"prior_type": "gla", "decay": "channel"},
    "gla unnormalised": {"prior_type": "gla", "normalize": False},
    "mamba unnormalised": {"prior_type": "mamba", "normalize": False},
}

EVERY = FAMILIES | {"operator": {"prior": lambda x: x.cumsum(1)}}  # which keeps no state

ABLATIONS = {
    "C,L,T,G": {},
    "-G": {"use_outer_gate": False},
    "-G,T": {"use_outer_gate": False, "use_temperature": False},
    "-G,T,L": {"use_outer_gate": False, "use_temperature": False, "use_lse": False},
    "-T": {"use_temperature": False},
    "-C": {"use_conv": False},
    "-C,G,T,L": {"use_conv": False, "use_outer_gate": False, "use_temperature": False, "use_lse": False},
}


def some_pairs(one, other, every=3):
    """Pairs of two lists in which every entry of both occurs, and one of `every` possible pairs."""
    return [(a, b) for i, a in enumerate(one) for j, b in enumerate(other) if (i + j) % every == 0]


SPLIT = {"free_share": 0.5}  # some channels read the mean, the others the free energy


def stirred(module, size=0.2):
    """The module, every parameter of which is away from its start."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(size * torch.randn_like(parameter))
    return module


def make_layer(dtype=torch.float64, seed=0, prior=None, **fields) -> FreeEnergyMixer:
    """prior: an operator of the user's own in a prior's place."""
    torch.manual_seed(seed)
    config = FreeEnergyMixerConfig(**{"n_embd": WIDTH, "n_head": HEADS} | fields)
    return stirred(FreeEnergyMixer(config, None if prior is None else OperatorPrior(prior))).to(dtype).eval()


def streamed(layer, x, sizes, **marks):
    """The joined outputs of pieces of so many tokens, each from the state before, and the state behind each."""
    outputs, states = [], [None]
    for first, size in zip(accumulate(sizes, initial=0), sizes):
        piece = slice(first, first + size)
        given = {name: mark[:, piece] for name, mark in marks.items()}
        output, state = layer(x[:, piece], state=states[-1], return_state=True, **given)
        outputs.append(output), states.append(state)
    return torch.cat(outputs, 1), states[1:]


def tokens(batch=2, time=TIME, dtype=torch.float64, seed=1):
    return torch.randn(batch, time, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
