"""Linear attention token by token, in logarithms: what a call reads, and one step of it."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from fem.ops.common.cells import cell_step, read_over_cells
from fem.ops.common.precision import upcast
from fem.ops.common.read import LOG_ZERO, Terms, log


class LinearInputs(NamedTuple):
    """What the scan of linear attention reads."""

    q: Float[Tensor, "b t h dk"]
    k: Float[Tensor, "b t h dk"]
    g: Float[Tensor, "b t h _"] | None  # the decay into each token, of a head or of its key channels
    opens: Bool[Tensor, "b t"] | None  # where a document begins
    v: Float[Tensor, "b t h dv"]
    f: Float[Tensor, "b t h df"]
    beta: Float[Tensor, "h df"]


def linear_step(memory: Terms, x: LinearInputs) -> tuple[Terms, Terms]:
    """The read of one token and the memory after it, (B, H, d_k, ..), whose cells are key channels.

    w'_c = e^{g_c} w_c + k_c        mean'_c, F'_c: the reads of channel c and of the token, merged
    Z = sum_c q_c w'_c      mean = sum_c q_c w'_c mean'_c / Z      F = (1/beta) log(sum_c q_c w'_c e^{beta F'_c} / Z)
    """
    rate = x.beta.unsqueeze(1)
    q, k, g, v, f = (None if part is None else part.transpose(1, 2) for part in (x.q, x.k, decay(x), x.v, x.f))
    after = cell_step(memory, log(k).mT, None if g is None else g.mT, v, f, rate)
    read = read_over_cells(log(q).mT + after.log_weight, after.mean, after.free_energy, rate)
    return Terms(*(part.transpose(1, 2) for part in read)), after


def log_decay(logits: Tensor) -> Tensor:
    """g = logsigmoid(logits) / 16 <= 0, in at least fp32."""
    return F.logsigmoid(upcast(logits)) / 16


def decay(x: LinearInputs) -> Tensor | None:
    """The decay by which the memory is forgotten where a document opens."""
    if x.opens is None:
        return x.g
    g = torch.zeros_like(x.q[..., :1]) if x.g is None else x.g
    return torch.where(x.opens[:, :, None, None], LOG_ZERO, g)
