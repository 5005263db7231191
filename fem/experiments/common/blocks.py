"""The blocks that small experiments put around a mixer, and how their linear maps start."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from fem.experiments.common.baselines import Published

EPS = 1e-5
INITIALISATIONS = ("normal", "torch")


class SwiGLU(nn.Module):
    """y = W_down (silu(W_gate x) * W_up x)"""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.gate_and_up = nn.Linear(width, 2 * inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        gate, up = self.gate_and_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Residual(nn.Module):
    """x + layer(RMSNorm(x))"""

    def __init__(self, width: int, layer: nn.Module):
        super().__init__()
        self.norm = nn.RMSNorm(width, EPS)
        self.layer = layer

    def forward(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        return x + self.layer(self.norm(x))


@torch.no_grad()
def initialise(model: nn.Module, initialisation: str) -> None:
    published = {part for layer in model.modules() if isinstance(layer, Published) for part in layer.modules()}
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear):
            own = module.weight[:, : module.in_features - getattr(module, "context", 0)]
            if initialisation == "torch":
                own.uniform_(-1, 1).div_(max(1, own.shape[1]) ** 0.5)
            else:
                own.normal_(std=getattr(module, "std", 0.02))
            if module.bias is not None and module not in published:
                nn.init.constant_(module.bias, getattr(module, "start", 0.0))
