"""The linear map that every part of a layer is built from."""

from __future__ import annotations

import torch
from torch import nn


class Projection(nn.Linear):
    """y = W x + W_c h + b, from features [x, h]: the input x and, behind it, the conditioner's h.        (Eq. 34a)

    W starts N(0, std), b at `start` and W_c at 0, so a new layer ignores its conditioner.
    """

    def __init__(
        self, inputs: int, width: int, bias: bool = True, context: int = 0, start: float = 0.0, std: float = 0.02
    ):
        self.context, self.start, self.std = context, start, std
        super().__init__(inputs + context, width, bias=bias)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)
        with torch.no_grad():
            self.weight[:, self.in_features - self.context :] = 0
        if self.bias is not None:
            nn.init.constant_(self.bias, self.start)
