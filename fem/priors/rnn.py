"""Linear RNNs as priors: every value channel has a distribution of its own, without queries or keys."""

from __future__ import annotations

from fem.config import FreeEnergyMixerConfig
from fem.ops.channel_scan.channel_scan_read import channel_scan_read
from fem.ops.linear_attention.linear_log_space import log_decay
from fem.prior_table import ROWS
from fem.priors.base import Prior
from fem.projection import mapped


class RNNSoftmaxPrior(Prior):
    """AFT: s_tj(i) = exp(k_ij), a log-weight k = W x + b per token and channel.               (Eq. 30, Appendix H.3)"""

    name = "rnn_softmax"
    widths = staticmethod(ROWS["rnn_softmax"].widths)
    map_names = ("log_weight",)
    per_channel = True

    def __init__(self, config: FreeEnergyMixerConfig):
        super().__init__(config)
        self.log_weight = self.project(config.fem_dim)

    def read(self, features, v, beta, tokens, memory, free_values=None):
        (log_weight,) = mapped(self.maps(), features)
        log_weight = log_weight.unflatten(-1, (-1, self.config.value_width))
        return self.scan(channel_scan_read, log_weight, v, beta, tokens=tokens, memory=memory, free_values=free_values)


class RNNDecayPrior(Prior):
    """s_tj(i) = exp(sum_{i<r<=t} g_rj),   g = logsigmoid(W x + b) / 16 per channel.           (Eq. 31, Appendix H.3)"""

    name = "rnn_decay"
    widths = staticmethod(ROWS["rnn_decay"].widths)
    map_names = ("decay",)
    per_channel = True

    def __init__(self, config: FreeEnergyMixerConfig):
        super().__init__(config)
        self.decay = self.project(config.fem_dim)

    def read(self, features, v, beta, tokens, memory, free_values=None):
        (logits,) = mapped(self.maps(), features)
        decay = log_decay(logits).unflatten(-1, (-1, self.config.value_width))
        return self.scan(channel_scan_read, None, v, beta, decay, tokens=tokens, memory=memory, free_values=free_values)
