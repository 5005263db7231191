"""Linear attention by the kernels of flash-linear-attention: stateless reads, in chunks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fem.ops.common.composed import LEAST, opaque, pack, proven, unpack
from fem.ops.common.read import LOG_ZERO, Terms
from fem.ops.linear_attention.chunk import State
from fem.ops.linear_attention.plain import scan


def kernel(q: Tensor, k: Tensor, items: Tensor, g: Tensor | None, borders: Tensor | None) -> Tensor:
    """sum_{i <= t} (q_t . e^{sum g} k_i) items_i for (B, T, H, d); borders: where documents begin, of a single row."""
    if g is not None and g.ndim == 4:
        from fla.ops.gla import chunk_gla

        return chunk_gla(q, k, items, g, scale=1.0, cu_seqlens=borders)[0]
    from fla.ops.simple_gla import chunk_simple_gla

    return chunk_simple_gla(q, k, items, g, scale=1.0, cu_seqlens=borders)[0]


def _read(q, k, v, free, beta, g, opens) -> list[Tensor]:
    """q, k of masked tokens are 0; g (B, T, H, 1 or d_k); opens (B, T): the tokens that open a document."""
    width = v.shape[-1]
    values, e, *shift = pack(v, v if free is None else free, beta)
    ones = values.new_ones(*v.shape[:3], 1)
    items = torch.cat([values, *([] if e is None else [e]), ones], -1)
    dtype = torch.bfloat16 if v.dtype == torch.bfloat16 else torch.float32
    items = F.pad(items, (0, -items.shape[-1] % 16)).to(dtype)
    decay = g.squeeze(-1) if g is not None and g.shape[-1] == 1 else g
    inputs, borders = [q.to(dtype), k.to(dtype), items, decay], None
    if opens is not None:  # rows one after another, each document a sequence
        first = opens | (torch.arange(opens.shape[1], device=opens.device) == 0)
        borders = F.pad(first.flatten().nonzero().squeeze(1), (0, 1), value=first.numel())
        inputs = [None if x is None else x.flatten(0, 1).unsqueeze(0) for x in inputs]
    sums = kernel(*inputs, borders).float().view(*v.shape[:3], -1)
    of_e = width if beta is None else width + beta.shape[1]
    # A product with a decay below e^-87 is flushed to 0: it is below that share of sum_c q_tc max k.
    scale = q.float().sum(-1, keepdim=True) * k.float().amax((1, 3), keepdim=True)
    weight = sums[..., of_e : of_e + 1]
    energies = None if beta is None else sums[..., width:of_e]
    terms, rows, entries = unpack(weight, sums[..., :width], energies, *shift, (LEAST * scale).detach())
    return proven(terms, rows, entries, scale > 0, lambda: _plain(q, k, v, free, beta, g, opens))


def _plain(q, k, v, free, beta, g, opens) -> Terms:
    q, k, v = (x.float() for x in (q, k, v))
    free = None if free is None else free.float()
    g = forget(q, g, opens)
    start = [x for x in State.empty(k, v, free, beta) if x is not None]
    return Terms(*scan(q, k, v, free, beta, g, start, True)[: len(start)])


def forget(q: Tensor, g: Tensor | None, opens: Tensor | None) -> Tensor | None:
    """Decays by which the state is forgotten where a document starts."""
    if opens is None:
        return g
    g = torch.zeros_like(q[..., :1]) if g is None else g
    return torch.where(opens[:, :, None, None], LOG_ZERO, g)


def _empty(q, k, v, free, beta, g, opens) -> list[Tensor]:
    shapes = [(*v.shape[:3], 1), v.shape]
    shapes += [] if beta is None else [v.shape if free is None else free.shape]
    return [v.new_empty(shape, dtype=torch.float32) for shape in shapes]


_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? free, Tensor? beta, Tensor? g, Tensor? opens"
composed = opaque("linear_attention_composed", _INPUTS, _read, _empty)
