"""The Free Energy Mixer layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

import torch
from jaxtyping import Float
from torch import Tensor

from fem import fused_layer, joint_maps, parts_layer
from fem.call import Call, unknown_argument
from fem.conditioner import TimeDecayConditioner
from fem.config import FreeEnergyMixerConfig, build_config
from fem.inspection import Reading, read_tables
from fem.ops.common.read import Read
from fem.ops.common.tokens import PLAIN, Tokens
from fem.pipeline import FreeEnergyLayer
from fem.priors import PRIORS, OperatorPrior, Prior
from fem.projection import Projection, move
from fem.state import MixerState, kind_of


class FreeEnergyMixer(FreeEnergyLayer):
    """A sequence mixer whose channels each pick their own token, under any prior.

        mean_tj = sum_i p_t(i) v_ij          F_tj = (1 / beta_j) log sum_i p_t(i) exp(beta_j v_ij)            (Eq. 4)
        o_t = W_O (g_t * ((1 - lambda_t) mean_t + lambda_t F_t))                                             (Eq. 11)

    x (B, T, D) -> y (B, T, D). attention_mask (B, T), bool or 0/1, True/1 = keep: masking a token equals deleting it.
    segment_ids (B, T): packed documents equal separate runs. With return_state=True the call returns (y, state);
    given that state, the next call continues the sequence by any number of tokens, and its mask and ids cover those.

    config, or its fields by name: FreeEnergyMixer(n_embd=512, n_head=8) has the linear weights of attention, as in
    `FreeEnergyMixerConfig.matched`, unless a field names a width.
    prior: a `Prior` of your own; by default the one that config.prior_type names. device, dtype: of the parameters.
    Raises ValueError on wrong shapes, on a state of another layer or batch, and on any state where causal=False;
    TypeError on a float mask, on integer x and on what is no state.
    """

    def __init__(
        self,
        config: FreeEnergyMixerConfig | None = None,
        prior: Prior | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **sizes,
    ):
        super().__init__()
        if config is None and sizes:
            config, sizes = build_config(**sizes), {}
        _check_parts(config, prior, sizes)
        value_dim = config.kv_heads * config.value_width
        self.conditioner = TimeDecayConditioner(config) if config.use_conv else None
        self.value = Projection(config.n_embd, value_dim, config.bias)
        self.value_scale = (
            Projection(0, value_dim, bias=False, context=config.context_width) if config.use_conv else None
        )
        self.prior = PRIORS[config.prior_type](config) if prior is None else prior
        self.prior.check(config)
        _check_buffers(self.prior)
        self.takes_pairs = self.prior.takes_pairs
        self.add_read_parts(config, self.prior.beta_shape(config))
        self.kind = kind_of(config, self.prior.name)
        move(self, device, dtype)

    def forward(
        self,
        x: Float[Tensor, "b t d"],
        attention_mask: Tensor | None = None,
        segment_ids: Tensor | None = None,
        state: MixerState | None = None,
        return_state: bool = False,
        **unknown,
    ) -> Float[Tensor, "b t d"] | tuple[Float[Tensor, "b t d"], MixerState]:
        if unknown:
            raise unknown_argument(*unknown)
        call = Call.open(self, x, attention_mask, segment_ids, state, return_state).kept_first(self.config)
        f, hidden = self.features(call.x, call.tokens, call.hidden)  # [x, h]                     Eq. 33
        found = fused_layer.mixed(self, call, f) or parts_layer.mixed(self, call, f)  # in few launches, where they can
        if found is None:
            p, v, g = joint_maps.columns(self, f) or (f, self.modulated(call.x, f), f)
            read = lambda v, beta, free: self.prior(p, v, beta, call.tokens, call.memory, free)  # noqa: E731  Eq. 4
            found = self.mixed(g, v, read)  # g ((1 - lambda) mean + lambda F)                               Eq. 7, 11
        o, memory = found
        return call.close(self.projected(call.in_order(o)), memory, hidden)

    def read_by(
        self,
        x: Float[Tensor, "b t d"],
        position: Tensor,
        attention: Callable[..., Read],
        tokens: Tokens = PLAIN,
        hidden: Float[Tensor, "b c"] | None = None,
    ) -> tuple[Float[Tensor, "b t d"], Float[Tensor, "b c"] | None]:
        """A softmax layer whose read is attention(q, k, v, beta, free_values), which keeps a cache of its own.

        position: (B, T), where the tokens stand in their document. tokens and hidden are the conditioner's: what it
        skips, and its state before; the state after is returned.
        """
        f, hidden = self.features(x, tokens, hidden)
        p, v, g = joint_maps.columns(self, f) or (f, self.modulated(x, f), f)
        q, k = self.prior.queries_and_keys(p, position)
        if not q.shape[-1] == k.shape[-1] == self.prior.config.key_width:
            raise ValueError(
                f"queries and keys of the prior {self.prior.name!r} must be {self.prior.config.key_width} wide for an "
                f"attention of others, which scales and caches them so, got {q.shape[-1]} and {k.shape[-1]}; without "
                "attn_implementation a model reads any."
            )
        o, _ = self.mixed(g, v, lambda *values: (attention(q, k, *values), None))
        return self.projected(o), hidden

    def features(
        self, x: Float[Tensor, "b t d"], tokens: Tokens, hidden: Float[Tensor, "b c"] | None
    ) -> tuple[Float[Tensor, "b t f"], Float[Tensor, "b c"] | None]:
        """[x, h], the input with the conditioner's local features behind it, and the conditioner's state after it."""
        return (x, None) if self.conditioner is None else self.conditioner(x, tokens, hidden)

    def modulated(self, x: Float[Tensor, "b t d"], features: Float[Tensor, "b t f"]) -> Float[Tensor, "b t h dv"]:
        """v (1 + eta_v), all values of a head side by side.                                          (Eq. 34b)"""
        scale = None if self.value_scale is None else self.value_scale(features[..., self.config.n_embd :])
        return self.scaled(self.value(x), scale)

    def scaled(self, v: Float[Tensor, "b t _"], scale: Float[Tensor, "b t _"] | None) -> Float[Tensor, "b t h dv"]:
        """`modulated` of v and eta_v."""
        v = v if scale is None else torch.addcmul(v, v, scale)
        return torch.unflatten(v, -1, (-1, self.config.value_width))

    @torch.no_grad()
    def inspect(
        self, x: Float[Tensor, "b t d"], attention_mask: Tensor | None = None, segment_ids: Tensor | None = None
    ) -> Reading:
        """Tables of what the layer reads from x: O(T) reads and O(T^2) memory per channel, so only for small T."""
        call = Call.open(self, x, attention_mask, segment_ids, None, False).masked()
        if 0 in x.shape[:2]:
            raise ValueError(f"inspect needs at least one row and one token, got x of shape {tuple(x.shape)}.")
        tokens = call.tokens
        features, _ = self.features(call.x, tokens, None)
        beta = self.temperature(call.x)
        v, free_values = self.parts(self.modulated(call.x, features), beta)
        read, _ = self.prior(features, v, beta, tokens, None, free_values)
        if free_values is not None:
            v = free_values if self.config.free_share is None else torch.cat([v, free_values], -1)
        selection = self.prior.selection(features, v, tokens)
        return read_tables(read, beta, self.gate.factors(features), selection, self.prior.per_channel, x.shape[1])

    def parameter_report(self) -> dict:
        """Numbers of weights by place: {"linear", "budget" (4 D^2), "ratio", "conditioner", "blocks" (with biases)}.

        linear: weights of every linear map, the prior's own included; conditioner: all that C adds.   (Appendix H.7)
        """
        context = self.config.context_width
        columns = sum(context * m.out_features for m in self.modules() if isinstance(m, Projection) and m.context)
        conditioner = columns + sum(p.numel() for p in (self.conditioner.parameters() if self.conditioner else ()))
        budget = 4 * self.config.n_embd**2
        linear = self.config.weights_around_prior + self.prior.widths(self.config).linear
        blocks = {name: sum(p.numel() for p in block.parameters()) for name, block in self.named_children()}
        return {
            "linear": linear,
            "budget": budget,
            "ratio": linear / budget,
            "conditioner": conditioner,
            "blocks": {name: count for name, count in blocks.items() if count},
        }


def _check_parts(config: FreeEnergyMixerConfig, prior: Prior | None, sizes: dict) -> None:
    if not isinstance(config, FreeEnergyMixerConfig):
        raise TypeError(
            f"config must be a FreeEnergyMixerConfig, or its fields by name (n_embd=512, n_head=8), "
            f"got a {type(config).__name__}."
        )
    if sizes:
        raise TypeError(f"give config or fields by name, not both, got config and {', '.join(sizes)}.")
    if prior is not None and not isinstance(prior, Prior):
        got = f"the class {prior.__name__}" if isinstance(prior, type) else repr(prior)
        raise TypeError(f"prior must be a Prior that was built, such as OperatorPrior(op), or None, got {got}.")
    if prior is not None and prior.config is not None and prior.config != config:
        named = [
            field.name for field in fields(config) if getattr(prior.config, field.name) != getattr(config, field.name)
        ]
        shown = lambda config: ", ".join(f"{name}={getattr(config, name)!r}" for name in named)  # noqa: E731
        raise ValueError(
            f"prior must be built from the layer's own configuration, with {shown(config)}, got {shown(prior.config)}."
        )


def _check_buffers(prior: Prior) -> None:
    """Raise unless every buffer of the prior is saved, but for an OperatorPrior: from_pretrained builds none."""
    lost = {name for name, _ in prior.named_buffers()} - prior.state_dict().keys()
    if lost and not isinstance(prior, OperatorPrior):
        raise ValueError(
            f"buffer {min(lost)!r} of a prior must be persistent, got persistent=False: transformers' from_pretrained "
            "builds a model without values, and nothing would fill in what was not saved."
        )


torch.serialization.add_safe_globals([FreeEnergyMixerConfig])  # a checkpoint may hold it beside the weights
