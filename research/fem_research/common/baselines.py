"""Mixers of flash-linear-attention and mamba-ssm, which run where these libraries and a GPU are."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn


class Baseline(NamedTuple):
    module: str
    layer: str
    arguments: Callable[[int, int], dict]  # from width and heads


def _by_heads(width: int, heads: int) -> dict:
    return {"hidden_size": width, "num_heads": heads}


BASELINES = {
    "RWKV6": Baseline("fla.layers", "RWKV6Attention", _by_heads),
    "RWKV7": Baseline(  # always as the first layer, which needs no output of an earlier one
        "fla.layers",
        "RWKV7Attention",
        lambda d, h: {"hidden_size": d, "head_dim": 64, "layer_idx": 0, "num_hidden_layers": 2},
    ),
    "LinAttn": Baseline("fla.layers", "LinearAttention", _by_heads),
    "HGRN2": Baseline("fla.layers", "HGRN2Attention", lambda d, h: {"hidden_size": d, "expand_ratio": d // h}),
    "PaTHAttention": Baseline("fla.layers", "PaTHAttention", _by_heads),
    "GatedSlotAttention": Baseline("fla.layers", "GatedSlotAttention", _by_heads),
    "DeltaNet": Baseline("fla.layers", "DeltaNet", _by_heads),
    "GatedDeltaNet": Baseline(
        "fla.layers",
        "GatedDeltaNet",
        lambda d, h: {"hidden_size": d, "num_heads": h, "head_dim": d // h, "expand_v": 1},
    ),
    "Mamba2": Baseline("fla.layers", "Mamba2", lambda d, h: {"hidden_size": d, "num_heads": d // 32, "head_dim": 64}),
    "Mamba (fla)": Baseline("fla.layers", "Mamba", lambda d, h: {"hidden_size": d, "intermediate_size": 2 * d}),
    "GLA (fla)": Baseline("fla.layers", "GatedLinearAttention", _by_heads),
    "Mamba (mamba-ssm)": Baseline("mamba_ssm", "Mamba", lambda d, h: {"d_model": d}),
}
PUBLISHED = {f"fla:{baseline.layer}": name for name, baseline in BASELINES.items() if baseline.module == "fla.layers"}


def available(name: str, device: torch.device) -> bool:
    """Whether a baseline can run here: its library is installed and the device is a GPU."""
    return device.type == "cuda" and find_spec(BASELINES[name].module.partition(".")[0]) is not None


class Published(nn.Module):
    """A layer of another library: of what it returns, the first item, which is its output."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        y = self.layer(x)
        return y[0] if isinstance(y, tuple) else y


def build(name: str, width: int, heads: int) -> nn.Module:
    baseline = BASELINES[name]
    return Published(getattr(import_module(baseline.module), baseline.layer)(**baseline.arguments(width, heads)))
