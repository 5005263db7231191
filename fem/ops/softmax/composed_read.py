"""The softmax read by torch's own operations: an attention kernel between a fused prologue and a fused epilogue.

It runs on a card, and wherever `torch.export` traces; gradients are torch's own.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from fem.ops.common.backend import exporting, multiplies_bfloat16
from fem.ops.common.precision import upcast, without_autocast
from fem.ops.common.read import LOG_ZERO, Read
from fem.ops.softmax.card_attention import WIDEST, attend_on_card, compiled_on_card, widest_flexible
from fem.ops.softmax.exact import exact_where
from fem.ops.softmax.packing import Packing
from fem.ops.softmax.support import Support

_PROVEN_SPAN = 58.0  # nats: the shift takes up to log 2 more, the rounding of p and e the rest to 60


def composed_read(
    q: Tensor, k: Tensor, v: Tensor, f: Tensor, beta: Tensor, support: Support, span: float = math.inf
) -> Read:
    """The mean of v and the free energy of f under a softmax prior, as a chain of torch's own operations.

    [mean | R] = attention(q, k, [v | e]), where R proves an entry (`packing`); others are computed again from the
    definition in float64. span: what beta (max f - min f) is at most, in nats; up to 58 it proves all entries. A graph
    of `torch.export` computes nothing again: an f more than 58 nats below the largest of its row counts as 58 below.
    On a card, 16-bit inputs are read in bfloat16, as e would leave float16's range, and in float32 where the card does
    not multiply bfloat16. Where FlexAttention does not run, a table of T x T restricts attention. Shapes as in
    `softmax_read`. A row that sees no key reads 0.
    """
    exported = exporting()
    rounds = not exported and q.dtype.itemsize == 2 and multiplies_bfloat16(q.device)
    dtype = torch.bfloat16 if rounds else upcast(q).dtype
    row = dtype.itemsize * max(x.shape[3] for x in (q, v, f))
    masked = exported or (support.restricted and row > widest_flexible(q.device))
    with without_autocast(q.device):
        q, k, v = (x.to(dtype) for x in (q, k, v))
        together = masked or v.shape[3] + f.shape[3] <= max(WIDEST, q.shape[3])
        parts, packing = compiled_on_card(_prologue, q)(v, f, beta, together)
        if masked:
            out, sees = _masked(q, k, *parts, support)
        else:
            out, lses = zip(*(attend_on_card(q, k, part, support) for part in parts))
            lse = next((lse for lse in lses if lse is not None), None)
            sees = None if lse is None else (lse > -torch.inf).transpose(1, 2)[..., None]
        mean, free_energy, doubt = compiled_on_card(_epilogue, q)(out, beta, packing, sees)
        if exported or not f.shape[3] or span <= _PROVEN_SPAN:
            return Read(mean, free_energy)
        return Read(mean, exact_where(doubt, free_energy, q, k, f, beta, support))


def _prologue(v, f, beta, together: bool) -> tuple[list[Tensor], tuple[Tensor, Tensor | None]]:
    """[v | e] in one piece or in two, the shift (B, 1, H, d_f), and where e is exp(.) - 1."""
    f = upcast(f)
    packing = Packing.of(f, upcast(beta)[None, None])
    z = packing.exponents(f)
    z = z.clamp_min(-_PROVEN_SPAN) if exporting() else z
    parts = [v, packing.energies(z).to(v.dtype)]
    return [torch.cat(parts, -1)] if together else parts, packing[1:]


def _epilogue(
    out: tuple[Tensor, ...],
    beta: Tensor,
    packed: tuple[Tensor, Tensor | None],
    sees: Bool[Tensor, "#b #tq #h 1"] | None,
) -> tuple[Float[Tensor, "b tq h dv"], Float[Tensor, "b tq h df"], Bool[Tensor, "b tq h df"]]:
    """Mean, free energy, and where it is not proven."""
    channels = beta.shape[1]
    mean, total = out if len(out) > 1 else out[0].split((out[0].shape[-1] - channels, channels), -1)
    total = upcast(total)
    packing = Packing(upcast(beta)[None, None], *packed).per_query_head(total.shape[2])
    doubt = packing.doubtful(total)
    total = torch.where(doubt if sees is None else doubt | ~sees, 1.0, total)
    free_energy = packing.shift + packing.logarithm(total) / packing.beta
    if sees is None:
        return mean, free_energy, doubt
    return torch.where(sees, mean, 0.0), torch.where(sees, free_energy, 0.0), doubt & sees


def _masked(q, k, values, support: Support) -> tuple[tuple[Tensor], Bool[Tensor, "#b #tq #h 1"] | None]:
    """p @ values under a table of what is added to the scores, and which rows see a key; None: all do."""
    mask = sees = None
    if support.restricted:
        mask = support.mask(q.shape[1], k.shape[1], q.device, LOG_ZERO).to(q.dtype)
        sees = (mask > LOG_ZERO).any(-1, keepdim=True).transpose(1, 2)
    per_head = lambda x: x.repeat_interleave(q.shape[2] // x.shape[2], 2)  # noqa: E731
    q, k, values = (x.transpose(1, 2) for x in (q, per_head(k), per_head(values)))
    causal = support.causal and mask is None
    out = F.scaled_dot_product_attention(q, k, values, mask, is_causal=causal, scale=support.scale)
    return (out.transpose(1, 2),), sees
