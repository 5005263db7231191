"""Models of scan priors inside vLLM: each request has one slot that holds its states, as for vLLM's own Mamba.

vllm serve runs/my-gla --hf-overrides '{"architectures": ["FEMStatesForCausalLM"]}'
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.models.interfaces import HasInnerState, IsAttentionFree
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from fem.config import FreeEnergyMixerConfig
from fem.mixer import FreeEnergyMixer
from fem.models.engines.support import obstacle_to_states
from fem.state import CachePosition, MixerState

CONDITIONER = "conditioner"


def state_of_a_row(config: FreeEnergyMixerConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors, without values, that a layer keeps of one row, the widest numbers first: no number of a page that
    holds them all is then out of line."""
    with torch.device("meta"):
        _, state = FreeEnergyMixer(config).to(dtype)(torch.empty(1, 1, config.n_embd, dtype=dtype), return_state=True)
    tensors = _tensors(state)
    return {name: tensors[name][0] for name in sorted(tensors, key=lambda name: -tensors[name].itemsize)}


def _tensors(state: MixerState) -> dict[str, Tensor]:
    return state.memory | ({} if state.conditioner is None else {CONDITIONER: state.conditioner})


class ServedMixer(FreeEnergyMixer, MambaBase):
    """A layer that reads the tokens of all running requests, each after its own state, which vLLM keeps."""

    mamba_type = MambaAttentionBackendEnum.LINEAR

    def __init__(self, config: FreeEnergyMixerConfig, prefix: str, dtype: torch.dtype):
        super().__init__(config)
        self.prefix = prefix
        self.row = state_of_a_row(config, dtype)
        self.kv_cache = tuple(torch.empty(0) for _ in self.row)
        get_current_vllm_config().compilation_config.static_forward_context[prefix] = self

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(x.shape) for x in self.row.values())

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return tuple(x.dtype for x in self.row.values())

    def forward(self, x: Tensor, *_) -> Tensor:
        """x (1, N, D): the tokens of all requests, one after another, those with a single one first."""
        metadata = get_forward_context().attn_metadata
        if metadata is None:  # vLLM measures the memory that a call takes
            return super().forward(x)
        metadata = metadata[self.prefix]
        y = torch.zeros_like(x)
        ends = metadata.query_start_loc.tolist()
        slots = metadata.state_indices_tensor.long()
        lengths = metadata.query_start_loc.diff()
        before = (metadata.seq_lens - lengths).long()
        alone = (lengths == 1) & (before > 0)  # a token of each of these: one call for all
        if bool(alone.any()):
            at = metadata.query_start_loc[:-1][alone].long()
            y[0, at] = self._continue(x[0, at, None], slots[alone], before[alone])[:, 0]
        for row in (~alone & (lengths > 0)).nonzero().flatten().tolist():
            part = slice(ends[row], ends[row + 1])
            y[:, part] = self._continue(x[:, part], slots[row : row + 1], before[row : row + 1])
        return y

    def _continue(self, x: Tensor, slots: Tensor, before: Tensor) -> Tensor:
        """The next tokens of some requests, (B, T, D), which have had `before` tokens each: none of them
        any, or each of them some."""
        state = None
        if bool(before.any()):
            tensors = dict(zip(self.row, (cache[slots] for cache in self.kv_cache)))
            none = torch.zeros_like(before)
            position = CachePosition(position=before, document=none, segment=none, started=before > 0)
            state = MixerState(self._kind, x.dtype, tensors, tensors.pop(CONDITIONER, None), position)
        y, state = super().forward(x, state=state, return_state=True)
        after = _tensors(state)
        for name, cache in zip(self.row, self.kv_cache):
            cache[slots] = after[name]
        return y


class FEMStatesForCausalLM(nn.Module, HasInnerState, IsAttentionFree):
    """`FEMForCausalLM` whose layers all have one scan prior, with the conditioner or without."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        config, dtype = vllm_config.model_config.hf_config, vllm_config.model_config.dtype
        ranks = vllm_config.parallel_config.tensor_parallel_size
        reason = obstacle_to_states(config)
        if reason is not None:
            raise ValueError(f"FEMStatesForCausalLM cannot serve this model: {reason}")
        if ranks != 1:
            raise ValueError(f"tensor_parallel_size must be 1 for a model with states, got {ranks}.")
        self.fem = AutoModelForCausalLM.from_config(config, dtype=dtype)
        for index, block in enumerate(self.fem.model.layers):
            block.mixer = ServedMixer(block.mixer.config, f"{prefix}layers.{index}.mixer", dtype)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.fem.model.embed_tokens(input_ids)

    def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None, **_) -> Tensor:
        x = (self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds)[None]
        for block in self.fem.model.layers:
            x = block(x)
        return self.fem.model.norm(x)[0]

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        return self.fem.lm_head(hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        found = dict(weights)
        missing, unknown = self.fem.load_state_dict(found, strict=False)
        self.fem.tie_weights()
        if unknown or set(missing) - set(self.fem._tied_weights_keys):
            raise ValueError(f"the checkpoint is of another model: missing {missing}, unknown {unknown}.")
        return {f"fem.{name}" for name, _ in self.fem.named_parameters()}

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(x.shape) for x in cls._row(vllm_config).values())

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
        return tuple(x.dtype for x in cls._row(vllm_config).values())

    @staticmethod
    def _row(vllm_config: VllmConfig) -> dict[str, Tensor]:
        model = vllm_config.model_config
        return state_of_a_row(model.hf_config.mixer_configs()[0], model.dtype)
