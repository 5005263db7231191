"""Attention on a CPU over values that are wider than the keys.

torch's flash attention takes one width: keys padded to that of [v | e] would up to double its work. Here some heads at
a time are read by blocks of 64 queries, so that a block's scores stay in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

_ROWS = 64
_SCORES = 1 << 17  # of a block at most, for each thread


class _Part(NamedTuple):
    """Some heads of some rows of the batch."""

    batch: slice
    heads: slice

    def of(self, x: Float[Tensor, "b t h w"]) -> Float[Tensor, "n t w"]:
        return x[self.batch, :, self.heads].transpose(1, 2).flatten(0, 1)

    def put(self, out: Float[Tensor, "b t h w"], x: Float[Tensor, "n t w"]) -> None:
        target = out[self.batch, :, self.heads]
        target.copy_(x.unflatten(0, (-1, target.shape[2])).transpose(1, 2))


class WideAttention:
    """Attention by the `Scores` of scores.py over values (B, T, H, w)."""

    def __init__(self, scores, values: Float[Tensor, "b t h w"]):
        self.q, self.k, self.values, mask = scores.q, scores.k, values, scores.mask
        self.causal, self.scale = scores.causal, scores.scale
        self.mask = None if mask is None else mask.expand(len(self.q), *self.q.shape[2:0:-1], self.k.shape[1])
        self.above = torch.full((_ROWS, _ROWS), -torch.inf, dtype=self.q.dtype, device=self.q.device).triu_(1)

    def forward(self) -> tuple[Float[Tensor, "b tq h w"], Float[Tensor, "b tq h"]]:
        """p @ values, and lse_t = log sum_i exp(s_ti), 0 in a row without keys."""
        out, lse = (self.q.new_empty(*self.q.shape[:3], width) for width in (self.values.shape[-1], 1))
        for part in self._parts():
            q, k, values = part.of(self.q).mul(self.scale), part.of(self.k), part.of(self.values)
            for rows, keys in self._blocks():
                s = self._restricted(q[:, rows] @ k[:, keys].mT, part, rows, keys)
                top = s.amax(-1, keepdim=True)
                top.masked_fill_(top.isneginf(), 0.0)
                total = s.sub_(top).exp_().sum(-1, keepdim=True)
                total.masked_fill_(total == 0, 1.0)
                part.put(out[:, rows], (s @ values[:, keys]).div_(total))
                part.put(lse[:, rows], top.add_(total.log_()))
        return out, lse[..., 0]

    def backward(self, grad: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        """Gradients of q, k and values from that of `out`: ds = p (dp - sum_w dout out), dp = dout values^T."""
        grads = dq, dk, dvalues = [torch.empty_like(x) for x in (self.q, self.k, self.values)]
        for part in self._parts():
            q, k, values = part.of(self.q).mul(self.scale), part.of(self.k), part.of(self.values)
            g, lse_of = part.of(grad), part.of(lse[..., None])
            through = (g * part.of(out)).sum(-1, keepdim=True)
            of_k, of_values = torch.zeros_like(k), torch.zeros_like(values)
            for rows, keys in self._blocks():
                s = torch.baddbmm(lse_of[:, rows], q[:, rows], k[:, keys].mT, beta=-1)
                p = self._restricted(s, part, rows, keys).exp_()
                ds = torch.baddbmm(through[:, rows], g[:, rows], values[:, keys].mT, beta=-1).mul_(p)
                part.put(dq[:, rows], (ds @ k[:, keys]).mul_(self.scale))
                of_k[:, keys].baddbmm_(ds.mT, q[:, rows])
                of_values[:, keys].baddbmm_(p.mT, g[:, rows])
            part.put(dk, of_k)
            part.put(dvalues, of_values)
        return tuple(grads)

    def _parts(self) -> Iterator[_Part]:
        batch, _, heads, _ = self.q.shape
        room = max(1, _SCORES * torch.get_num_threads() // (_ROWS * self.k.shape[1]))  # heads at a time
        rows = max(1, room // heads)
        for start in range(0, batch, rows):
            for head in range(0, heads, room):
                yield _Part(slice(start, start + rows), slice(head, head + room))

    def _blocks(self) -> Iterator[tuple[slice, slice]]:
        """The queries of a block, and the keys that they can see."""
        queries, keys = self.q.shape[1], self.k.shape[1]
        for start in range(0, queries, _ROWS):
            stop = min(start + _ROWS, queries)
            yield slice(start, stop), slice(0, min(stop, keys) if self.causal else keys)

    def _restricted(self, s: Float[Tensor, "n r keys"], part: _Part, rows: slice, keys: slice) -> Tensor:
        """The scores of a block with the mask and causality, in place."""
        if self.mask is not None:
            mask = self.mask[part.batch, part.heads, rows, keys]
            s.unflatten(0, mask.shape[:2]).add_(mask)
        if self.causal:
            later = s[..., rows.start :]
            later.add_(self.above[: later.shape[1], : later.shape[2]])
        return s
