"""Linear maps of one input as a single product: their weights one below the other, and the gradients of each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

Weights = Sequence[Float[Tensor, "_ _"]]
Biases = Sequence[Float[Tensor, " _"] | None]


def joined(
    x: Float[Tensor, "b t f"], weights: Weights, biases: Biases | None
) -> tuple[Float[Tensor, "c f"], Float[Tensor, " c"] | None]:
    """W and b of all maps, in x's dtype; a weight is 0 for those features of x that its map does not read."""
    inputs = x.shape[-1]
    weight = torch.cat([w if w.shape[1] == inputs else F.pad(w, (0, inputs - w.shape[1])) for w in weights])
    if biases is None:
        return weight.to(x.dtype), None
    missing = [len(w) for w, b in zip(weights, biases) if b is None]
    zeros = iter(weight.new_zeros(sum(missing)).split_with_sizes(missing) if missing else ())
    return weight.to(x.dtype), torch.cat([next(zeros) if b is None else b for b in biases]).to(x.dtype)


class Maps:
    """What the gradients of joined maps need to know of each."""

    def __init__(self, weights: Weights, biases: Biases):
        self.dtype, self.shapes = weights[0].dtype, [w.shape for w in weights]
        self.biased = [b is not None for b in biases]

    def gradients(self, d_weight: Float[Tensor, "c f"], d_bias: Float[Tensor, " c"] | None) -> list[Tensor | None]:
        """Those of all weights, then of all biases."""
        rows = [shape[0] for shape in self.shapes]
        d_weights = d_weight.to(self.dtype).split_with_sizes(rows)
        d_weights = [d if d.shape == shape else d[:, : shape[1]] for d, shape in zip(d_weights, self.shapes)]
        d_biases = d_bias.to(self.dtype).split_with_sizes(rows) if self.biased else ()
        return [*d_weights, *(d if biased else None for d, biased in zip(d_biases, self.biased))]
