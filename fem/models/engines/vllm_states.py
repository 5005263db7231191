"""Models with states inside vLLM: each request has a slot that holds those of scan priors and conditioners, as for
vLLM's own Mamba, and softmax layers read [v | e] over its paged cache.

    vllm serve runs/my-gla --hf-overrides '{"architectures": ["FEMStatesForCausalLM"]}'
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_utils import get_temporal_copy_spec
from vllm.model_executor.models.interfaces import HasInnerState, IsHybrid
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.linear_attn import LinearAttentionBackend, LinearAttentionMetadataBuilder
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from fem.config import FreeEnergyMixerConfig
from fem.mixer import FreeEnergyMixer
from fem.models.engines.obstacles import attends, check_cache_dtype, has_state, obstacle_to_states
from fem.ops.common.tokens import Tokens, read_tokens
from fem.state import CachePosition, MixerState

CONDITIONER = "conditioner"
PAGED = "vllm_paged"  # the attention of softmax layers


def state_of_a_row(config: FreeEnergyMixerConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors, without values, that a layer keeps of one row, the widest numbers first: no number of a page that
    holds them all is then out of line."""
    with torch.device("meta"):
        _, state = FreeEnergyMixer(config).to(dtype)(torch.empty(1, 1, config.n_embd, dtype=dtype), return_state=True)
    tensors = _tensors(state.memory, state.conditioner, config)
    return {name: tensors[name][0] for name in sorted(tensors, key=lambda name: -tensors[name].itemsize)}


def _tensors(memory: dict[str, Tensor], conditioner: Tensor | None, config: FreeEnergyMixerConfig) -> dict[str, Tensor]:
    """The content of a slot: all of a state but keys and values, which stand in vLLM's cache."""
    memory = {} if attends(config) else memory
    return memory if conditioner is None else memory | {CONDITIONER: conditioner}


@dataclass(frozen=True)
class Rows:
    """New tokens of requests that a layer reads in one call, equally many of each.

    tokens: (B, T), their places among all new tokens; requests: (B,); position: what came before; new: their slots
    hold nothing yet.
    """

    tokens: Tensor
    requests: Tensor
    position: CachePosition
    new: bool


def rows_of(metadata) -> list[Rows]:
    """One call for all requests that go on with one token, and one for every other. Waits for the device twice."""
    starts, ends = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
    tokens = [range(first, last) for first, last in pairwise(starts)]
    before = [end - len(places) for places, end in zip(tokens, ends)]
    single, others = [], []
    for request, places in enumerate(tokens):
        if len(places) == 1 and before[request]:
            single.append(request)
        elif places:
            others.append([request])
    on_device = lambda numbers: torch.tensor(numbers, device=metadata.seq_lens.device)  # noqa: E731
    calls = []
    for requests in filter(None, [single, *others]):
        seen = on_device([before[request] for request in requests])
        none = torch.zeros_like(seen)
        position = CachePosition(position=seen, document=none, segment=none)
        places = on_device([list(tokens[request]) for request in requests])
        calls.append(Rows(places, on_device(requests), position, not before[requests[0]]))
    return calls


class SlotsBuilder(LinearAttentionMetadataBuilder):
    """vLLM's own, but no CUDA graph can hold a step: `rows_of` decides on the host what is read together."""

    _cudagraph_support = AttentionCGSupport.NEVER


class SlotsBackend(LinearAttentionBackend):
    @staticmethod
    def get_builder_cls() -> type[SlotsBuilder]:
        return SlotsBuilder


class ServedMixer(FreeEnergyMixer, MambaBase):
    """A layer that takes the tokens of all running requests, each after its own state, which vLLM keeps.

    rows: which tokens are whose, as the model has set it for all layers; None while vLLM measures the memory of a call.
    """

    rows: list[Rows] | None = None

    mamba_type = MambaAttentionBackendEnum.LINEAR

    def __init__(self, config: FreeEnergyMixerConfig, prefix: str, dtype: torch.dtype):
        super().__init__(config)
        self.prefix = prefix
        self.row = state_of_a_row(config, dtype)
        self.kv_cache = tuple(torch.empty(0) for _ in self.row)
        get_current_vllm_config().compilation_config.static_forward_context[prefix] = self

    def get_attn_backend(self) -> type[SlotsBackend]:
        return SlotsBackend

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(x.shape) for x in self.row.values())

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return tuple(x.dtype for x in self.row.values())

    def forward(self, x: Tensor, *_) -> Tensor:
        """The layer of a scan prior. x (1, N, D): the tokens of all requests, one after another."""
        return self._by_request(x, self._next)

    def features(self, x: Tensor, tokens: Tokens, hidden: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The features of a softmax layer follow each request's conditioner; keys and values are the engine's."""
        if attends(self.config):
            return self._by_request(x, self._next_features), None
        return super().features(x, tokens, hidden)

    def _next(self, x: Tensor, held: dict[str, Tensor] | None, position: CachePosition):
        state = None
        if held is not None:
            state = MixerState(self.kind, x.dtype, held, held.pop(CONDITIONER, None), position)
        y, state = super().forward(x, state=state, return_state=True)
        return y, _tensors(state.memory, state.conditioner, self.config)

    def _next_features(self, x: Tensor, held: dict[str, Tensor] | None, position: CachePosition):
        tokens, _ = read_tokens(tuple(x.shape[:2]), x.device, cache_position=position)
        features, hidden = super().features(x, tokens, None if held is None else held[CONDITIONER])
        return features, {CONDITIONER: hidden}

    def _by_request(self, x: Tensor, function) -> Tensor:
        """function(new tokens (B, T, D), what their rows' slots hold or None, their position) for every request."""
        if self.rows is None:
            return function(x, None, CachePosition.zero(1, x.device))[0]
        slots = get_forward_context().attn_metadata[self.prefix].state_indices_tensor.long()
        y = None
        for rows in self.rows:
            index = slots[rows.requests]
            held = None if rows.new else dict(zip(self.row, (cache[index] for cache in self.kv_cache)))
            part, after = function(x[0, rows.tokens], held, rows.position)
            for name, cache in zip(self.row, self.kv_cache):
                cache[index] = after[name]
            y = part.new_zeros(x.shape[1], part.shape[-1]) if y is None else y
            y[rows.tokens] = part
        return y[None]


def _paged(module: nn.Module, q: Tensor, k: Tensor, values: Tensor, attention_mask, **_) -> tuple[Tensor, None]:
    """q, k and [v | e] (1, H, N, w) of all requests' tokens, read over vLLM's cache: (1, N, H, w)."""
    by_token = lambda x: x[0].transpose(0, 1).flatten(1)  # noqa: E731
    out = module.paged(by_token(q), by_token(k), by_token(values))
    return out.view(1, q.shape[2], q.shape[1], -1), None


ALL_ATTENTION_FUNCTIONS.register(PAGED, _paged)


class FEMStatesForCausalLM(nn.Module, HasInnerState, IsHybrid):
    """`FEMForCausalLM` whose layers keep states, all of one size: a scan prior's, the conditioner's, or both.

    Softmax layers keep keys and [v | e] besides.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        config, dtype = vllm_config.model_config.hf_config, vllm_config.model_config.dtype
        ranks = vllm_config.parallel_config.tensor_parallel_size
        reason = obstacle_to_states(config)
        if reason is not None:
            raise ValueError(f"FEMStatesForCausalLM cannot serve this model: {reason}")
        if ranks != 1:
            raise ValueError(f"tensor_parallel_size must be 1 for a model with states, got {ranks}.")
        if vllm_config.speculative_config is not None:
            raise ValueError("speculative_config must be left out: states cannot forget the tokens that are rejected.")
        check_cache_dtype(config, vllm_config.cache_config.cache_dtype)
        self.fem = AutoModelForCausalLM.from_config(config, dtype=dtype)
        config._attn_implementation = PAGED
        for index, block in enumerate(self.fem.model.layers):
            name = f"{prefix}layers.{index}"
            if has_state(block.mixer.config):
                block.mixer = ServedMixer(block.mixer.config, f"{name}.mixer", dtype)
            if not attends(block.mixer.config):
                continue
            block.paged = Attention(
                config.num_attention_heads,
                config.head_dim,
                block.scaling,
                num_kv_heads=config.num_key_value_heads,
                cache_config=vllm_config.cache_config,
                per_layer_sliding_window=block.mixer.config.window,
                prefix=f"{name}.attention",
            )

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.fem.model.embed_tokens(input_ids)

    def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None, **_) -> Tensor:
        x = (self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds)[None]
        metadata = get_forward_context().attn_metadata
        served = [block.mixer for block in self.fem.model.layers if isinstance(block.mixer, ServedMixer)]
        rows = None if metadata is None else rows_of(metadata[served[0].prefix])
        for mixer in served:
            mixer.rows = rows
        for block in self.fem.model.layers:
            x = block(x, position_ids=positions[None])
        return self.fem.model.norm(x)[0]

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        return self.fem.lm_head(hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        missing, unknown = self.fem.load_state_dict(dict(weights), strict=False)
        self.fem.tie_weights()
        wanted = {name for name, _ in self.fem.named_parameters()}
        if unknown or wanted & set(missing):
            lost = sorted(wanted & set(missing))
            raise ValueError(f"the checkpoint must be of this model, got one without {lost} and with {unknown}.")
        return {f"fem.{name}" for name in wanted}

    def get_mamba_state_copy_funcs(self, kinds: set) -> dict:
        """The functions by which vLLM copies the states of a shared prefix: each state as a whole."""
        count = next(len(block.mixer.row) for block in self.fem.model.layers if has_state(block.mixer.config))
        return dict.fromkeys(kinds, (get_temporal_copy_spec,) * count)

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(x.shape) for x in cls._row(vllm_config).values())

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
        return tuple(x.dtype for x in cls._row(vllm_config).values())

    @staticmethod
    def _row(vllm_config: VllmConfig) -> dict[str, Tensor]:
        model = vllm_config.model_config
        return state_of_a_row(next(filter(has_state, model.hf_config.mixer_configs())), model.dtype)
