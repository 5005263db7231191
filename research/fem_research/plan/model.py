"""What a model is made of, counted: parameters as processes hold them, activations as autograd keeps them, caches."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fem.mixer import FreeEnergyMixer
from fem.models import FEMConfig, FEMForCausalLM
from fem.models.modeling import FEMBlock
from fem.models.presets import preset
from fem_research.plan.settings import FORMS

SHORT, LONG = 64, 128  # tokens of the two forward passes whose difference is what one more token keeps


@dataclass(frozen=True)
class Weight:
    """A parameter as one of the processes that share a layer holds it."""

    name: str
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        return prod(self.shape)

    def shard(self, processes: int) -> int:
        """Numbers of the largest of the parts that FSDP2 cuts it into, by its first dimension."""
        return -(-self.shape[0] // processes) * prod(self.shape[1:])


@lru_cache(maxsize=32)
def config_of(size: str, form: str) -> FEMConfig:
    """The language model of the paper's size ("340m", "1.3b") in a form of `FORMS`."""
    return preset(f"{FORMS[form]}-{size}")


@lru_cache(maxsize=32)
def weights(size: str, form: str, tensor: int = 1) -> tuple[Weight, ...]:
    """The parameters, tied ones once, split by `base_model_tp_plan` and by entries of the vocabulary."""
    config = config_of(size, form)
    with torch.device("meta"):
        model = FEMForCausalLM(config)
    return tuple(Weight(n, split_shape(n, tuple(p.shape), config, tensor)) for n, p in model.named_parameters())


def split_shape(name: str, shape: tuple[int, ...], config: FEMConfig, tensor: int) -> tuple[int, ...]:
    """The part of a parameter that each of `tensor` processes has: rows of a column-parallel map."""
    style = style_of(name, config)
    if style == "rowwise":
        return shape if len(shape) == 1 else (shape[0], -(-shape[1] // tensor))
    return (-(-shape[0] // tensor), *shape[1:]) if style == "colwise" else shape


def style_of(name: str, config: FEMConfig) -> str | None:
    """The way in which tensor parallelism splits the parameter; None: every process has it whole."""
    if name in ("model.embed_tokens.weight", "lm_head.weight"):
        return "colwise"
    module = re.sub(r"\.\d+\.", ".*.", name.removeprefix("model."))
    plan = config.base_model_tp_plan
    return plan.get(module) or plan.get(module.rpartition(".")[0])


@lru_cache(maxsize=32)
def kept(size: str, form: str) -> tuple[int, int]:
    """Bytes that autograd keeps of one block for one token, in bfloat16, and bytes of the block's own input.

    Counted in two forward passes of the block on this CPU, of `SHORT` and `LONG` tokens; weights are not counted.
    """
    block, width = block_of(size, form), config_of(size, form).hidden_size
    short, long = (saved(block, torch.randn(1, t, width).bfloat16()) for t in (SHORT, LONG))
    return -(-(long - short) // (LONG - SHORT)), 2 * width


def block_of(size: str, form: str) -> FEMBlock:
    """A block of the model in bfloat16."""
    config = config_of(size, form)
    return FEMBlock(config, config.mixer_configs()[0], 0).bfloat16()


def saved(block: nn.Module, x: Tensor) -> int:
    """Bytes of all blocks of memory that autograd saves in a forward pass, the input's too, without the weights'."""
    held: dict[int, Tensor] = {}
    own = {p.untyped_storage().data_ptr() for p in block.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        held.setdefault(tensor.untyped_storage().data_ptr(), tensor)  # alive, so that no address is used twice
        return tensor

    norm = CardsNorm.apply if x.device.type == "cpu" else F.rms_norm
    with mock.patch.object(F, "rms_norm", norm), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = block(x.requires_grad_())
    del y
    return sum(t.untyped_storage().nbytes() for address, t in held.items() if address not in own)


class CardsNorm(torch.autograd.Function):
    """A norm that keeps what a card's kernel does, its input and a number a token; a CPU's keeps two float32 copies."""

    @staticmethod
    def forward(ctx, x: Tensor, shape: tuple[int, ...], weight: Tensor | None, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return x.clone()


@lru_cache(maxsize=32)
def cache(size: str, form: str) -> tuple[int, int]:
    """Bytes of the state of one row over all layers, in bfloat16: those that stay, and those that each token adds.

    As on a card: the stream of a CPU keeps e beside v.
    """
    config = config_of(size, form)
    with torch.no_grad(), torch.device("meta"):
        layer = FreeEnergyMixer(config.mixer_configs()[0]).bfloat16().eval()
        rows = (torch.randn(1, t, config.hidden_size).bfloat16() for t in (SHORT, LONG))
        states = (layer(x, return_state=True)[1] for x in rows)
        short, long = (state.reorder(torch.zeros(1, dtype=torch.long)).nbytes for state in states)  # no room for more
    token = (long - short) // (LONG - SHORT)
    return config.num_hidden_layers * (short - SHORT * token), config.num_hidden_layers * token
