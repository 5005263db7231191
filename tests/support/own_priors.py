"""Softmax priors under names of their own, as a user would register them."""

from __future__ import annotations

import torch
from torch import nn

from fem.prior_table import PRIORS
from fem.priors.softmax import SoftmaxPrior


class CosinePrior(SoftmaxPrior):
    """Own queries and keys, read as attention reads them."""

    name = "cosine"

    def queries_and_keys(self, features, position):
        q, k = super().queries_and_keys(features, position)
        return 4 * q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True)


class MeanPrior(SoftmaxPrior):
    """Keys and values of attention, but its free energy is the mean."""

    name = "mean_alone"

    def read(self, features, v, beta, tokens, memory, free_values=None):
        read, memory = super().read(features, v, beta, tokens, memory, free_values)
        return read._replace(free_energy=read.mean), memory


class WidePrior(SoftmaxPrior):
    """Keys with a number more, which says how long they are: softmax_i(-|q - k_i|^2)."""

    name = "wide"

    def queries_and_keys(self, features, position):
        q, k = super().queries_and_keys(features, position)
        length = k.square().sum(-1, keepdim=True)
        return torch.cat([2 * q, -torch.ones_like(q[..., :1])], -1), torch.cat([k, length], -1)


class WeightedPrior(SoftmaxPrior):
    """A parameter of its own, which nothing sets again."""

    name = "weighted"

    def __init__(self, config):
        super().__init__(config)
        self.weight = nn.Parameter(torch.ones(config.n_head))


class DoubleTurn(SoftmaxPrior):
    """Queries and keys that turn twice as far."""

    name = "double_turn"

    def rotated(self, tensors, position):
        return super().rotated(tensors, 2 * position)


class BoundedValues(SoftmaxPrior):
    """A read of its own."""

    name = "bounded_values"

    def read(self, features, v, beta, tokens, memory, free_values=None):
        return super().read(features, v.tanh(), beta, tokens, memory, free_values)


def register(monkeypatch) -> None:
    for prior in (CosinePrior, MeanPrior, WidePrior, WeightedPrior):
        monkeypatch.setitem(PRIORS, prior.name, prior)
