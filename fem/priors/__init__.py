"""The priors by name. A new prior is one file here and one entry in `PRIORS`."""

from __future__ import annotations

from fem.prior_table import PRIORS
from fem.priors.base import Prior
from fem.priors.linear_attention import GatedLinearPrior, LinearPrior
from fem.priors.mamba import InteractiveMambaPrior, MambaPrior
from fem.priors.operator import OperatorPrior
from fem.priors.rnn import RNNDecayPrior, RNNSoftmaxPrior
from fem.priors.softmax import SoftmaxPrior

OURS = [SoftmaxPrior, LinearPrior, GatedLinearPrior, RNNSoftmaxPrior, RNNDecayPrior, MambaPrior, InteractiveMambaPrior]
PRIORS |= {prior.name: prior for prior in OURS}

__all__ = ["PRIORS", "OperatorPrior", "Prior"]
