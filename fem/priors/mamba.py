"""Selective state-space models as priors."""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fem.config import FreeEnergyMixerConfig
from fem.ops.common.backend import exporting
from fem.ops.common.precision import softplus, upcast, without_autocast
from fem.ops.common.read import read_free, read_of, rounded
from fem.ops.ssm.mix_channels import mix_channels
from fem.ops.ssm.ssm_numbers import ssm_numbers
from fem.ops.ssm.ssm_read import ssm_read, ssm_terms
from fem.optim import mark_undecayed
from fem.prior_table import ROWS
from fem.priors.base import Prior, indicators
from fem.projection import mapped

LONGEST_MEMORY = 512  # tokens after which the slowest state of a new layer has lost half


class SelectiveSSM(nn.Module):
    """The score H_tj(i) = sum_n C_tn exp(sum_{i<r<=t} Delta_rj A_jn) Delta_ij B_in + D_j [i = t].      (Appendix H.4)

    Delta, B, C = softplus(W x + b), A = -softplus(.), D = softplus(.) starting at 1. A starts at rates spread evenly
    on a log scale, so that half-lives run from 1 to 512 tokens.
    """

    undecayed = ("a", "d")

    def __init__(self, config: FreeEnergyMixerConfig, project):
        super().__init__()
        heads, width, rank = config.n_head, config.value_width, config.ssm_rank
        self.delta = project(config.fem_dim)
        self.b = project(rank)
        self.c = project(rank)
        self.a = nn.Parameter(torch.empty(heads, width, rank))
        self.d = nn.Parameter(torch.empty(heads, width))
        self.reset_parameters()
        mark_undecayed(self)

    def reset_parameters(self) -> None:
        rank = self.a.shape[-1]
        for state in range(rank):  # by a function that takes sharded parameters, too
            half_life = LONGEST_MEMORY ** (state / max(1, rank - 1))
            # Delta starts at softplus(0) = log 2, so half is left after a half-life
            nn.init.constant_(self.a[..., state], _inverse_softplus(1 / half_life))
        nn.init.constant_(self.d, _inverse_softplus(1))

    def maps(self) -> list[nn.Module]:
        return [self.delta, self.b, self.c]

    def forward(self, features: Tensor | list[Tensor]) -> tuple[tuple[Tensor, ...], tuple[Tensor, Tensor, Tensor]]:
        """Delta (B, T, H, d_v), A (H, d_v, N), B and C (B, T, N), D (H, d_v), and the logarithms of Delta, B and C."""
        delta, b, c = mapped(self.maps(), features)
        return ssm_numbers(delta.unflatten(-1, self.d.shape), self.a, b, c, self.d)


class MambaPrior(Prior):
    """p_tj(i) = H_tj(i) / sum_r H_tj(r), H the impulse response of a selective SSM.           (Eq. 32, Appendix H.4)"""

    name = "mamba"
    uses, widths = ROWS["mamba"].uses, staticmethod(ROWS["mamba"].widths)
    per_channel = True

    def __init__(self, config: FreeEnergyMixerConfig):
        super().__init__(config)
        self.ssm = SelectiveSSM(config, self.project)

    def maps(self):
        return self.ssm.maps()

    def read(self, features, v, beta, tokens, memory, free_values=None):
        numbers, logs = self.ssm(features)
        op = partial(ssm_read, logs=logs)
        return self.scan(op, *numbers, v, beta, tokens=tokens, memory=memory, free_values=free_values)


class InteractiveMambaPrior(MambaPrior):
    """p_tj(i, k) proportional to M_jk H_tk(i): output channel j selects among pairs of token and channel.

        F_tj = (1 / beta) log sum_{i,k} p_tj(i, k) exp(beta v_ik)                             (Section 2.3.3 iv)

    M = softplus of a learnt (d_v, d_v) matrix per head, started near the identity; beta is one per head.
    """

    name = "mamba_interactive"
    undecayed = ("mixing",)
    uses, widths = ROWS["mamba_interactive"].uses, staticmethod(ROWS["mamba_interactive"].widths)
    takes_pairs = False  # its channels are mixed, so none is read on its own

    def __init__(self, config: FreeEnergyMixerConfig):
        super().__init__(config)
        self.mixing = nn.Parameter(torch.empty(config.n_head, config.value_width, config.value_width))
        self.reset_parameters()
        mark_undecayed(self)

    def reset_parameters(self) -> None:
        width = self.mixing.shape[-1]
        nn.init.constant_(self.mixing, _inverse_softplus(0.1 / width))
        for channel in range(width):
            nn.init.constant_(self.mixing[:, channel, channel], _inverse_softplus(1))

    @staticmethod
    def beta_shape(config: FreeEnergyMixerConfig) -> tuple[int, ...]:
        return (config.n_head,)

    def read(self, features, v, beta, tokens, memory, free_values=None):
        f, rate = read_free(v, None, beta)
        rate = rate.unsqueeze(-1).expand(-1, v.shape[-1]) if f is v else rate
        rate = rate.clone() if exporting() else rate  # of a view AOTInductor writes a buffer twice (PyTorch 2.13)
        terms, after = self._terms(features, v, f, rate, tokens, memory)
        with without_autocast(v.device):
            terms = mix_channels(softplus(self.mixing), terms, rate)
        read = rounded(read_of(terms, rate, self.config.normalize), v.dtype, beta)
        return read, None if memory is None else after

    def _terms(self, features, v, f, rate, tokens, memory=None):
        numbers, logs = self.ssm(features)
        return ssm_terms(*numbers, v, f, rate, logs, self.scan_call(tokens, memory))

    def selection(self, features, v, tokens):
        mixing = F.softplus(upcast(self.mixing))
        read = lambda one: self._terms(features, one, *read_free(one, None, None), tokens)[0]  # noqa: E731
        within = torch.stack([read(one).mean for one in indicators(v)], -1)
        weight = read(v).log_weight[..., None, :] + mixing.log()
        pairs = weight.softmax(-1) if self.config.normalize else weight.exp()
        pairs = torch.einsum("bthjk,bthki->bthjik", pairs, within).flatten(-2)
        values = v.permute(0, 2, 1, 3).flatten(2)
        return pairs, values[:, None, :, None].expand_as(pairs)


def _inverse_softplus(y: float) -> float:
    return y + math.log(-math.expm1(-y))
