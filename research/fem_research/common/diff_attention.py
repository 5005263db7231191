"""Differential attention (Ye and others, arXiv 2410.05258), which is in no library."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from fem.ops.common.rope import frequencies, rotate_all


class DifferentialAttention(nn.Module):
    """Multi-head differential attention, with RoPE and 4 D^2 weights as attention has.                 (Eq. 1 to 3)

        head = (softmax(Q_1 K_1^T / sqrt(d)) - lambda softmax(Q_2 K_2^T / sqrt(d))) V
        lambda = exp(l_q1 . l_k1) - exp(l_q2 . l_k2) + lambda_init,    lambda_init = 0.8 - 0.6 exp(-0.3 (layer - 1))
        o = W_O [(1 - lambda_init) RMSNorm(head_1), ..., (1 - lambda_init) RMSNorm(head_h)]

    Of a Transformer with `heads` heads of d channels it has half as many heads, whose values are 2 d wide; l: d numbers
    each, which all heads share, from N(0, 0.1). layer: the number of the layer in its model, from 1 on.

    Raises ValueError where twice its heads do not divide the width into even parts.
    """

    undecayed = ("lambdas",)

    def __init__(self, width: int, heads: int, layer: int = 1):
        super().__init__()
        self.heads, self.layer = max(1, heads // 2), layer
        self.half = width // (2 * self.heads)
        if width % (2 * self.heads) or self.half % 2:
            raise ValueError(f"width must be a multiple of 4 x {self.heads} heads, got {width}.")
        self.query, self.key, self.value, self.output = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.lambdas = nn.Parameter(0.1 * torch.randn(4, self.half))  # l_q1, l_k1, l_q2, l_k2
        self.norm = nn.RMSNorm(2 * self.half, 1e-5)

    @property
    def lambda_init(self) -> float:
        return 0.8 - 0.6 * math.exp(-0.3 * (self.layer - 1))

    def weight(self) -> Tensor:
        """lambda, of the second map."""
        q1, k1, q2, k2 = self.lambdas.float()
        return (q1 @ k1).exp() - (q2 @ k2).exp() + self.lambda_init

    def forward(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        position = torch.arange(x.shape[1], device=x.device)
        q, k = (part(x).unflatten(-1, (2 * self.heads, self.half)) for part in (self.query, self.key))
        q, k = rotate_all((q, k), position, frequencies(self.half, 10000.0, x.device))
        v = self.value(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, h, T, 2 d)
        first, second = (
            F.scaled_dot_product_attention(
                q[:, :, i::2].transpose(1, 2), k[:, :, i::2].transpose(1, 2), v, is_causal=True
            )
            for i in (0, 1)  # head j has queries 2 j and 2 j + 1
        )
        head = self.norm(first - self.weight().to(v.dtype) * second)
        return self.output(((1 - self.lambda_init) * head).transpose(1, 2).flatten(2))


def number_layers(model: nn.Module) -> nn.Module:
    """Tell every layer of differential attention which one of the model it is."""
    layers = [module for module in model.modules() if isinstance(module, DifferentialAttention)]
    for number, module in enumerate(layers, 1):
        module.layer = number
    return model
