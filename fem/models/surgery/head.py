"""The part that is added to an attention which keeps its projections: the free energy, lambda and the outer gate."""

from __future__ import annotations

from collections.abc import Iterator

from jaxtyping import Float
from torch import Tensor, nn

from fem import parts_layer
from fem.config import FreeEnergyMixerConfig
from fem.functional import softmax_read
from fem.gates import Temperature, TwoLevelGate
from fem.inspection import Reading, softmax_tables
from fem.ops.common.precision import product_dtype
from fem.ops.softmax.support import as_bias

LAMBDA_INIT = -10.0  # lambda = 4.5e-5


class FreeEnergyHead(nn.Module):
    """The read of an attention that keeps its projections.

        o_t = g_t * ((1 - lambda_t) mean_t + lambda_t F_t)                                             (Eq. 11)
        p_ti = softmax_i(scale q_t . k_i + bias_ti)      mean_t = sum_i p_ti v_i      F as in Eq. 4

    W_lambda and W_g start at almost 0, so at the start lambda = sigmoid(lambda_init) and g = 1 for every token, and
    o = mean up to lambda (F - mean). features (B, T_q, D) feed the gates; q (B, T_q, H, d_k), k, v (B, T, H_kv, .);
    the result is (B, T_q, H, d_v). Under autocast q, k and v are cast to its dtype, as the original's attention does.
    mask: of pairs, broadcastable to (B, H, T_q, T), in the place of a bias.
    """

    def __init__(self, config: FreeEnergyMixerConfig):
        super().__init__()
        self.backend = config.backend
        self.beta = Temperature(config, (config.kv_heads, config.value_width)) if config.use_temperature else None
        self.gate = TwoLevelGate(config)
        self.gate.ignore_features()

    def temperature_parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of lambda and beta. Their gradients are as small as lambda (sigmoid'): let them learn 30 times
        as fast as the original, or they stay where they start.
        """
        for part in (self.beta, self.gate.inner):
            if part is not None:
                yield from part.parameters()

    def forward(
        self,
        features: Float[Tensor, "b tq d"],
        q: Float[Tensor, "b tq h dk"],
        k: Float[Tensor, "b t hkv dk"],
        v: Float[Tensor, "b t hkv dv"],
        bias: Float[Tensor, "..."] | None,
        causal: bool,
        scale: float | None,
        mask: Tensor | None = None,
    ) -> Float[Tensor, "b tq h dv"]:
        logits, (q, k, v) = self.gate.logits(features), (x.to(product_dtype(x)) for x in (q, k, v))
        if bias is None and self.backend in ("auto", "sdpa"):
            o = parts_layer.gated(self, logits, q, k, v, causal, scale, mask)
            if o is not None:
                return o
        bias = bias if mask is None else as_bias(mask, q.dtype)
        beta = None if self.beta is None else self.beta()
        read = softmax_read(q, k, v, beta, causal=causal, scale=scale, bias=bias, backend=self.backend)
        return self.gate(logits, read)

    def inspect(
        self, features, q, k, v, bias, causal: bool, scale: float | None, mask: Tensor | None = None
    ) -> Reading:
        """Tables of what `forward` reads: O(T) reads and O(T^2) memory per channel, so only for small T."""
        bias = bias if mask is None else as_bias(mask, q.dtype)
        beta = None if self.beta is None else self.beta()
        options = {"causal": causal, "scale": scale, "bias": bias, "backend": self.backend}
        return softmax_tables(q, k, v, beta, self.gate.factors(features), **options)
