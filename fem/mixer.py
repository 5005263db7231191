"""The Free Energy Mixer layer."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fem.conditioner import TimeDecayConditioner
from fem.config import FreeEnergyMixerConfig
from fem.gates import Temperature, TwoLevelGate
from fem.inspection import Reading, read_tables
from fem.ops.common.read import Read
from fem.ops.common.tokens import Tokens, read_tokens
from fem.priors import PRIORS, Prior
from fem.projection import Projection
from fem.state import MixerState


class FreeEnergyMixer(nn.Module):
    """A sequence mixer whose channels each pick their own token, under any prior.

        mean_tj = sum_i p_t(i) v_ij          F_tj = (1 / beta_j) log sum_i p_t(i) exp(beta_j v_ij)            (Eq. 4)
        o_t = W_O (g_t * ((1 - lambda_t) mean_t + lambda_t F_t))                                             (Eq. 11)

    x (B, T, D) -> y (B, T, D). attention_mask (B, T), bool or 0/1, True/1 = keep: masking a token equals deleting it.
    segment_ids (B, T): packed documents equal separate runs. With return_state=True the call returns (y, state);
    given that state, the next call continues the sequence by any number of tokens, and its mask and ids cover those.

    prior: a `Prior` of your own; by default the one that config.prior_type names.
    Raises ValueError on wrong shapes, on a state of another layer or batch, and on any state where causal=False;
    TypeError on a float mask.
    """

    def __init__(self, config: FreeEnergyMixerConfig, prior: Prior | None = None):
        super().__init__()
        self.config = config
        value_dim = config.kv_heads * config.value_width
        self.conditioner = TimeDecayConditioner(config) if config.use_conv else None
        self.value = Projection(config.n_embd, value_dim, config.bias)
        self.value_scale = (
            Projection(0, value_dim, bias=False, context=config.context_width) if config.use_conv else None
        )
        self.prior = PRIORS[config.prior_type](config) if prior is None else prior
        self.beta = Temperature(config, self.prior.beta_shape(config)) if config.use_temperature else None
        self.gate = TwoLevelGate(config)
        self.dropout = nn.Dropout(config.dropout)
        self.output = Projection(config.fem_dim, config.n_embd, config.bias)

    def forward(
        self,
        x: Float[Tensor, "b t d"],
        attention_mask: Tensor | None = None,
        segment_ids: Tensor | None = None,
        state: MixerState | None = None,
        return_state: bool = False,
    ) -> Float[Tensor, "b t d"] | tuple[Float[Tensor, "b t d"], MixerState]:
        self._check(x, state, return_state)
        tokens, cursor = read_tokens(
            tuple(x.shape[:2]), x.device, attention_mask, segment_ids, None if state is None else state.cursor
        )
        features, hidden = self._features(x, tokens, state)
        v = self._values(x, features)
        memory = state.memory if state is not None else {} if return_state else None
        read, memory = self._read(features, v, tokens, memory)
        o = self.gate(features, read)
        y = self.output(self.dropout(o.flatten(-2)))
        return (y, MixerState(self._kind, x.dtype, memory, hidden, cursor)) if return_state else y

    def served(self, x: Float[Tensor, "b t d"], position: Tensor, attention) -> Float[Tensor, "b t d"]:
        """The layer on tokens at `position` (B, T), its read made by attention(q, k, v, beta), which has its own memory.

        For the softmax prior without a conditioner.
        """
        v = self._values(x, x)
        q, k = self.prior.queries_and_keys(x, position)
        o = self.gate(x, attention(q, k, v, self._temperature(v)))
        return self.output(self.dropout(o.flatten(-2)))

    def _features(self, x: Tensor, tokens: Tokens, state: MixerState | None) -> tuple[Tensor, Tensor | None]:
        """[x, h]: the input with the conditioner's local features behind it."""
        if self.conditioner is None:
            return x, None
        h, hidden = self.conditioner(x, tokens, None if state is None else state.conditioner)
        return torch.cat([x, h], -1), hidden

    def _values(self, x: Tensor, features: Tensor) -> Float[Tensor, "b t h d"]:
        v = self.value(x)
        if self.value_scale is not None:
            v = torch.addcmul(v, v, self.value_scale(features[..., self.config.n_embd :]))  # v (1 + eta_v), Eq. 34b
        return v.unflatten(-1, (-1, self.config.value_width))

    def _temperature(self, v: Tensor) -> Tensor | None:
        if not self.config.use_lse:
            return None
        return v.new_ones(self.prior.beta_shape(self.config)) if self.beta is None else self.beta()

    def _read(
        self, features: Tensor, v: Tensor, tokens: Tokens, memory: dict[str, Tensor] | None
    ) -> tuple[Read, dict[str, Tensor] | None]:
        beta, cap = self._temperature(v), self.config.value_logexp_cap
        if beta is None or cap is None:
            return self.prior.read(features, v, beta, tokens, memory)
        per_channel = beta.reshape(beta.shape[0], -1)  # of a head that has one for all, too
        clipped = ((per_channel * v).clamp(-cap, cap) / per_channel).to(v.dtype)
        mean, of_mean = self.prior.read(features, v, None, tokens, _part(memory, "mean."))
        free, of_free = self.prior.read(features, clipped, beta, tokens, _part(memory, "free."))
        if memory is not None:
            memory = {f"mean.{k}": m for k, m in of_mean.items()} | {f"free.{k}": m for k, m in of_free.items()}
        return Read(mean.mean, free.free_energy), memory

    def _check(self, x: Tensor, state: MixerState | None, return_state: bool) -> None:
        if x.ndim != 3 or x.shape[-1] != self.config.n_embd:
            raise ValueError(f"x must have shape (batch, time, n_embd = {self.config.n_embd}), got {tuple(x.shape)}.")
        if not self.config.causal and (state is not None or return_state):
            raise ValueError(
                "a state continues a causal sequence; this layer has causal=False: leave out state and return_state."
            )
        if state is not None:
            state.check(self._kind, x.shape[0], x.dtype, x.device)

    @property
    def _kind(self) -> str:
        """What a state must have been written by, in words."""
        config = self.config
        return (
            f"{self.prior.name} prior of {config.n_head} heads, keys {config.qk_dim}, values {config.fem_dim}, "
            f"{config.kv_heads} key heads, window {config.window}, decay {config.decay}, rank {config.ssm_rank}, "
            f"conditioner {config.context_width}, cap {config.value_logexp_cap}"
        )

    @torch.no_grad()
    def inspect(
        self, x: Float[Tensor, "b t d"], attention_mask: Tensor | None = None, segment_ids: Tensor | None = None
    ) -> Reading:
        """What the layer reads from x, as tables: O(T) reads and O(T^2) memory per channel, so small T alone."""
        self._check(x, None, False)
        tokens, _ = read_tokens(tuple(x.shape[:2]), x.device, attention_mask, segment_ids)
        features, _ = self._features(x, tokens, None)
        v = self._values(x, features)
        read, _ = self._read(features, v, tokens, None)
        lambda_, gate = self.gate.factors(features)
        beta = self._temperature(v)
        return read_tables(
            read, beta, lambda_, gate, *self.prior.selection(features, v, tokens), self.prior.per_channel
        )

    def parameter_report(self) -> dict:
        """Where the weights are: {"linear", "budget" (4 D^2), "ratio", "conditioner", "blocks" (with biases)}.

        linear: weights of every linear map, the prior's own included; conditioner: all that C adds.   (Appendix H.7)
        """
        context = self.config.context_width
        columns = sum(context * m.out_features for m in self.modules() if isinstance(m, Projection) and m.context)
        conditioner = columns + (
            0 if self.conditioner is None else sum(p.numel() for p in self.conditioner.parameters())
        )
        budget = 4 * self.config.n_embd**2
        linear = self.config.linear_weights
        blocks = {name: sum(p.numel() for p in block.parameters()) for name, block in self.named_children()}
        return {
            "linear": linear,
            "budget": budget,
            "ratio": linear / budget,
            "conditioner": conditioner,
            "blocks": {name: count for name, count in blocks.items() if count},
        }


def _part(memory: dict[str, Tensor] | None, prefix: str) -> dict[str, Tensor] | None:
    if memory is None:
        return None
    return {name.removeprefix(prefix): tensor for name, tensor in memory.items() if name.startswith(prefix)}
