"""`FEMForCausalLM` as torchtitan builds, shards, starts and saves a model."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.models.common.linear import Linear
from torchtitan.protocols.model import BaseModel
from torchtitan.protocols.module import ModuleDict
from torchtitan.protocols.state_dict_adapter import StateDictAdapter

from fem.models import FEMConfig, FEMForCausalLM
from fem.models.arguments import Inputs
from fem.models.engines.parallel import check_heads
from fem.ops.common.shared import Known
from fem.projection import Projection
from fem.train.throughput import flops_per_token

# Names in torchtitan, which shards, recomputes and compiles `layers` by their names, and names in transformers.
NAMES = {
    "tok_embeddings.": "model.embed_tokens.",
    "layers.": "model.layers.",
    "norm.": "model.norm.",
    "lm_head.": "lm_head.",
}


class FEMDecoder(BaseModel):
    """The parts of `FEMForCausalLM` under torchtitan's names; a pipeline stage has some of them, and None elsewhere."""

    _skip_lm_head = False  # set by the trainer where the loss applies the head to chunks of the rows
    sharing: DeviceMesh | None = None  # the processes that share a row, each with a part of it

    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):
        fields: dict  # of `FEMConfig`
        linear: Linear.Config = field(
            default_factory=lambda: Linear.Config(in_features=16, out_features=16)
        )  # of blocks

        @property
        def fem(self) -> FEMConfig:
            return FEMConfig(**self.fields)

        @property
        def layers(self) -> range:
            """The layers that torchtitan counts to cut a pipeline."""
            return range(self.fem.num_hidden_layers)

        def update_from_config(self, *, config, **kwargs) -> None:
            """Raise ValueError on what a FEM model cannot do in torchtitan."""
            fem, parallelism = self.fem, config.parallelism
            if parallelism.spmd_backend != "partial_dtensor":
                raise ValueError(
                    f"parallelism.spmd_backend must be 'partial_dtensor', got {parallelism.spmd_backend!r}."
                )
            if parallelism.context_parallel_degree > 1 and parallelism.context_parallel_load_balancer is not None:
                raise ValueError(
                    "parallelism.context_parallel_load_balancer must be None, as states are handed from one part of a "
                    f"row to the next, got {parallelism.context_parallel_load_balancer!r}."
                )
            if parallelism.context_parallel_degree > 1 and config.compile.enable:
                raise ValueError("compile.enable must be False where processes share a row: they wait for messages.")
            if parallelism.pipeline_parallel_degree > 1 and fem.tie_word_embeddings:
                raise ValueError("a pipeline needs tie_word_embeddings=False: its ends lie on different devices.")
            if not config.training.disable_cuda_graphs:
                raise ValueError(
                    "training.disable_cuda_graphs must be True: the certificate of a read decides on the host."
                )
            check_heads(fem, parallelism.tensor_parallel_degree)

        def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
            with torch.device("meta"):
                full = FEMForCausalLM(self.fem)
            return full.num_parameters(), flops_per_token(full, seq_len)

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        full = FEMForCausalLM(config.fem)
        for block in full.model.layers:
            if type(config.linear) is not Linear.Config:
                convert(block, config.linear)
        self.enable_weight_tying = full.config.tie_word_embeddings
        self.initializer_range = full.config.initializer_range
        self.tok_embeddings = full.model.embed_tokens
        self.layers = ModuleDict({str(i): block for i, block in enumerate(full.model.layers)})
        self.norm = full.model.norm
        self.lm_head = full.lm_head
        self.tie()

    def verify_module_protocol(self) -> None:
        """Check nothing: the parts are plain modules, which `parallelize` splits and `init_states` starts."""

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Logits of tokens (B, T), whose positions (B, T) restart where a document does."""
        x = tokens if self.tok_embeddings is None else self.tok_embeddings(tokens)
        if self.sharing is None or positions is None:
            documents = Inputs(x, position_ids=positions).documents()
        else:  # named by the place in the row where they start, by which the parts know those that go on
            begin = self.sharing.get_local_rank() * x.shape[1]
            documents = torch.arange(begin, begin + x.shape[1], device=x.device) - positions
        known = Known()
        for block in self.layers.values():
            x = block(x, segment_ids=documents, known=known)
        if self.norm is not None:
            x = self.norm(x)
        return x if self.lm_head is None or self._skip_lm_head else self.lm_head(x)

    def init_states(self, *, buffer_device: torch.device | None = None) -> None:
        """The starting values of `FEMForCausalLM`."""
        self.tie()
        for module in self.modules():
            if hasattr(module, "context"):  # a `Projection`, converted or not
                Projection.reset_parameters(module)
            elif isinstance(module, (nn.Embedding, nn.Linear)):
                nn.init.normal_(module.weight, std=self.initializer_range)
            elif module is not self and hasattr(module, "reset_parameters"):
                module.reset_parameters()

    def tie(self) -> None:
        """Let the head have the weights of the embeddings again, after what gave each of them its own."""
        if self.enable_weight_tying:
            self.lm_head.weight = self.tok_embeddings.weight


def convert(block: nn.Module, linear: Linear.Config) -> None:
    """Make a block's linear maps as a converter of torchtitan says (float8 ...), where it takes their sizes."""
    for parent in list(block.modules()):
        for name, part in list(parent.named_children()):
            if isinstance(part, nn.Linear) and part.in_features % 16 == part.out_features % 16 == 0:
                sizes = {"in_features": part.in_features, "out_features": part.out_features}
                made = replace(linear, **sizes, bias=part.bias is not None).build()
                for start in {"context", "start", "std"}.intersection(vars(part)):
                    setattr(made, start, getattr(part, start))
                setattr(parent, name, made)


class FEMStateDictAdapter(StateDictAdapter):
    """Weights between torchtitan's names and those of `FEMForCausalLM`'s safetensors."""

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        tied = self.model_config.fem.tie_word_embeddings
        kept = {name: value for name, value in state_dict.items() if not (tied and name == "lm_head.weight")}
        return {_renamed(name, NAMES): value for name, value in kept.items()}

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        names = {theirs: ours for ours, theirs in NAMES.items()}
        weights = {_renamed(name, names): value for name, value in hf_state_dict.items()}
        if self.model_config.fem.tie_word_embeddings:
            weights["lm_head.weight"] = weights["tok_embeddings.weight"]
        return weights


def _renamed(name: str, names: dict[str, str]) -> str:
    old = next(old for old in names if name.startswith(old))
    return names[old] + name.removeprefix(old)
