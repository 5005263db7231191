"""The Free Energy Mixer layer."""

from __future__ import annotations

from dataclasses import fields

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from fem.conditioner import TimeDecayConditioner
from fem.config import FreeEnergyMixerConfig
from fem.gates import Temperature, TwoLevelGate
from fem.inspection import Reading, read_tables
from fem.ops.common.read import Read
from fem.ops.common.tokens import PLAIN, Tokens, read_tokens
from fem.ops.common.transforms import transformed
from fem.optim import undecayed_names
from fem.priors import PRIORS, OperatorPrior, Prior
from fem.priors.base import buffer_error
from fem.projection import Projection, check_embedded, check_place
from fem.spoilt import find_spoilt, seen_from
from fem.state import CachePosition, MixerState, foreign_state

# Fields that no state depends on: how the layer starts, what it does after the read, which implementation reads.
NOT_IN_STATES = frozenset(
    [
        "prior_type",
        "fem_ratio",
        "p_t_to_fem_ratio",
        "mamba_normalize",
        "dropout",
        "use_outer_gate",
        "gate_rank",
        "lambda_init",
        "backend",
        "softmax_backend",
    ]
)


class FreeEnergyMixer(nn.Module):
    """A sequence mixer whose channels each pick their own token, under any prior.

        mean_tj = sum_i p_t(i) v_ij          F_tj = (1 / beta_j) log sum_i p_t(i) exp(beta_j v_ij)            (Eq. 4)
        o_t = W_O (g_t * ((1 - lambda_t) mean_t + lambda_t F_t))                                             (Eq. 11)

    x (B, T, D) -> y (B, T, D). attention_mask (B, T), bool or 0/1, True/1 = keep: masking a token equals deleting it.
    segment_ids (B, T): packed documents equal separate runs. With return_state=True the call returns (y, state);
    given that state, the next call continues the sequence by any number of tokens, and its mask and ids cover those.

    prior: a `Prior` of your own; by default the one that config.prior_type names.
    Raises ValueError on wrong shapes, on a state of another layer or batch, and on any state where causal=False;
    TypeError on a float mask, on integer x and on what is no state.
    """

    def __init__(self, config: FreeEnergyMixerConfig, prior: Prior | None = None):
        super().__init__()
        _check_parts(config, prior)
        self.config = config
        value_dim = config.kv_heads * config.value_width
        self.conditioner = TimeDecayConditioner(config) if config.use_conv else None
        self.value = Projection(config.n_embd, value_dim, config.bias)
        self.value_scale = (
            Projection(0, value_dim, bias=False, context=config.context_width) if config.use_conv else None
        )
        self.prior = PRIORS[config.prior_type](config) if prior is None else prior
        self.prior.check(config)
        _check_buffers(self.prior)
        self.beta = Temperature(config, self.prior.beta_shape(config)) if config.use_temperature else None
        self.gate = TwoLevelGate(config)
        self.dropout = nn.Dropout(config.dropout)
        self.output = Projection(config.fem_dim, config.n_embd, config.bias)
        self._kind = _kind(config, self.prior.name)

    def forward(
        self,
        x: Float[Tensor, "b t d"],
        attention_mask: Tensor | None = None,
        segment_ids: Tensor | None = None,
        state: MixerState | None = None,
        return_state: bool = False,
    ) -> Float[Tensor, "b t d"] | tuple[Float[Tensor, "b t d"], MixerState]:
        self._check(x, state, return_state)
        unmarked = return_state and attention_mask is None and segment_ids is None
        if unmarked and state is not None and self._steps(x) and self.prior.steps(state.memory):
            return self._step(x, state)
        tokens, cache_position = read_tokens(
            tuple(x.shape[:2]), x.device, attention_mask, segment_ids, None if state is None else state.cache_position
        )
        if 0 in x.shape[:2]:
            return self._read_nothing(x, state, return_state)
        x, state, spoilt = self._set_apart(tokens.zero_masked(x), tokens, state)
        features, hidden = self._features(x, tokens, state)
        v = self._values(x, features)
        memory = state.memory if state is not None else {} if return_state else None
        read, memory = self._read(features, v, tokens, memory)
        o = self.gate(features, read)
        y = self._output(o)
        if spoilt is not None:
            y = y + tokens.zero_masked(torch.zeros_like(y).masked_fill_(spoilt[..., None], torch.nan))
        if not return_state:
            return y
        state = MixerState(self._kind, x.dtype, memory, hidden, cache_position)
        if spoilt is not None:
            state = state.filled(spoilt[:, -1], torch.nan, self.prior.spoils_documents)
        if x.shape[1] == 1 or transformed():  # the activations of one token pin little memory
            return y, state
        return y, state.compact()

    @staticmethod
    def _steps(x: Tensor) -> bool:
        """Whether x is what `_step` takes: one token on a CPU, outside of gradients, graphs and transforms."""
        if torch.is_grad_enabled() or x.shape[1] != 1 or not x.shape[0] or not x.is_cpu:
            return False
        return not (torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu") or transformed())

    def _step(self, x: Float[Tensor, "b 1 d"], state: MixerState) -> tuple[Float[Tensor, "b 1 d"], MixerState]:
        """`forward` of one more token of a stream, in fewer operations."""
        before = state.cache_position
        features, hidden = self._features(x, PLAIN, state)
        v = self._values(x, features)[:, 0]
        features = features[:, 0]  # a map takes a matrix of tokens in two operations, (B, T, D) in four
        read, memory = self.prior.step(features, v, before.position, state.memory)
        y = self._output(self.gate(features, read))
        after = CachePosition(before.position + 1, before.document, before.segment, before.started)
        return y[:, None], MixerState(self._kind, x.dtype, memory, hidden, after)

    def _read_nothing(self, x: Tensor, state: MixerState | None, return_state: bool):
        """A call without rows or without tokens: run one masked token instead, and drop what it returns."""
        rows, time = x.shape[:2]
        one = F.pad(x, (0, 0, 0, 1 - min(time, 1), 0, 1 - min(rows, 1)))
        masked = torch.zeros(one.shape[:2], dtype=torch.bool, device=x.device)
        if not return_state:
            return self.forward(one, masked)[:rows, :time]
        y, after = self.forward(one, masked, return_state=True)
        if state is None:
            state = after.reorder(torch.arange(rows, device=x.device))
        return y[:rows, :time], state

    def served(
        self, x: Float[Tensor, "b t d"], position: Tensor, attention, features: Float[Tensor, "b t f"] | None = None
    ) -> Float[Tensor, "b t d"]:
        """The layer for an engine: read by attention(q, k, v, beta), which keeps a cache of its own.

        position (B, T): where the tokens stand. features: [x, h], h from the conditioner, whose state the engine keeps;
        None: the layer has none. For the softmax prior.
        """
        features = x if features is None else features
        v = self._values(x, features)
        q, k = self.prior.queries_and_keys(features, position)
        o = self.gate(features, attention(q, k, v, self._temperature(v)))
        return self._output(o)

    def _set_apart(
        self, x: Tensor, tokens: Tokens, state: MixerState | None
    ) -> tuple[Tensor, MixerState | None, Tensor | None]:
        """x without its NaN and infinity, the state without those of an earlier call, and the places that see them;
        None: none, or they reach none but these by themselves."""
        documents, memory = tokens.start is not None, self.prior.spoils_documents
        by_documents = memory or self.conditioner is not None
        spreads = by_documents if documents else self.prior.spoils_before and x.shape[1] > 1
        if not spreads or torch.compiler.is_exporting():
            return x, state, None
        before = state.spoilt(memory) if documents and state is not None else None
        spoilt = find_spoilt(x, before)
        if spoilt is None:
            return x, state, None
        if before is not None:  # any finite number: nothing of it is read behind the start of a document
            state = state.filled(before, 1.0, memory)
        return x.masked_fill(spoilt[..., None], 0), state, seen_from(spoilt, tokens, before, self.config.causal)

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
        return torch.unflatten(v, -1, (-1, self.config.value_width))

    def _output(self, o: Float[Tensor, "*t h dv"]) -> Float[Tensor, "*t d"]:
        o, dropout = o.flatten(-2), self.dropout
        return self.output(dropout(o) if dropout.training else o)

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
        per_channel = beta.reshape(beta.shape[0], -1)  # (H, d_v), or (H, 1) of a prior with one beta per head
        clipped = ((per_channel * v).clamp(-cap, cap) / per_channel).to(v.dtype)
        mean, of_mean = self.prior.read(features, v, None, tokens, _part(memory, "mean."))
        free, of_free = self.prior.read(features, clipped, beta, tokens, _part(memory, "free."))
        if memory is not None:
            memory = {f"mean.{k}": m for k, m in of_mean.items()} | {f"free.{k}": m for k, m in of_free.items()}
        return Read(mean.mean, free.free_energy), memory

    def _check(self, x: Tensor, state: MixerState | None, return_state: bool) -> None:
        check_embedded("x", x)
        if x.ndim != 3 or x.shape[-1] != self.config.n_embd:
            raise ValueError(f"x must have shape (batch, time, n_embd = {self.config.n_embd}), got {tuple(x.shape)}.")
        check_place("x", x, self.value)
        if state is not None and not isinstance(state, MixerState):
            raise TypeError(f"state must be a MixerState that this layer returned, got a {type(state).__name__}.")
        if not self.config.causal and (state is not None or return_state):
            raise ValueError(
                "a state continues a causal sequence; this layer has causal=False: leave out state and return_state."
            )
        if state is not None:
            self._check_state(state)
            state.check(x.shape[0], x.dtype, x.device)

    def _check_state(self, state: MixerState) -> None:
        if state.layer == self._kind or state.layer == _kind_before_0_2(self.config, self.prior.name):
            return
        if "=" not in state.layer:
            raise foreign_state("layer", state.layer, self._kind)
        got, wanted = (dict(item.split("=") for item in kind.split(", ")) for kind in (state.layer, self._kind))
        shown = lambda kind: ", ".join(f"{name}={kind[name]}" for name in differing)  # noqa: E731
        differing = [name for name in wanted if name in got and _value(got[name]) != _value(wanted[name])]
        if differing:
            raise foreign_state("layer", shown(got), shown(wanted))

    @torch.no_grad()
    def inspect(
        self, x: Float[Tensor, "b t d"], attention_mask: Tensor | None = None, segment_ids: Tensor | None = None
    ) -> Reading:
        """What the layer reads from x, as tables: O(T) reads and O(T^2) memory per channel, so small T alone."""
        self._check(x, None, False)
        tokens, _ = read_tokens(tuple(x.shape[:2]), x.device, attention_mask, segment_ids)
        if 0 in x.shape[:2]:
            raise ValueError(f"inspect needs at least one row and one token, got x of shape {tuple(x.shape)}.")
        x = tokens.zero_masked(x)
        features, _ = self._features(x, tokens, None)
        v = self._values(x, features)
        read, _ = self._read(features, v, tokens, None)
        lambda_, gate = self.gate.factors(features)
        beta = self._temperature(v)
        return read_tables(
            read, beta, lambda_, gate, *self.prior.selection(features, v, tokens), self.prior.per_channel
        )

    def no_weight_decay(self) -> set[str]:
        """Names of all parameters that weight decay should leave alone, as timm asks for them."""
        return undecayed_names(self)

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


def _kind(config: FreeEnergyMixerConfig, prior: str) -> str:
    """The prior and every configuration field that a state depends on: a state is for layers of its own kind alone."""
    named = {field.name: getattr(config, field.name) for field in fields(config) if field.name not in NOT_IN_STATES}
    written = lambda value: ";".join(map(str, value)) if isinstance(value, tuple) else value  # noqa: E731
    return ", ".join(f"{name}={written(value)}" for name, value in ({"prior": prior} | named).items())


def _value(written: str) -> float | str:
    """What `_kind` wrote of a field; 10000 is 10000.0."""
    try:
        return float(written)
    except ValueError:
        return written


def _kind_before_0_2(config: FreeEnergyMixerConfig, prior: str) -> str:
    """The same as version 0.1 wrote it into saved states."""
    return (
        f"{prior} prior of {config.n_head} heads, keys {config.qk_dim}, values {config.fem_dim}, "
        f"{config.kv_heads} key heads, window {config.window}, decay {config.decay}, rank {config.ssm_rank}, "
        f"conditioner {config.context_width}, cap {config.value_logexp_cap}"
    )


def _check_parts(config: FreeEnergyMixerConfig, prior: Prior | None) -> None:
    if not isinstance(config, FreeEnergyMixerConfig):
        raise TypeError(f"config must be a FreeEnergyMixerConfig, got a {type(config).__name__}.")
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
        raise buffer_error(min(lost))
