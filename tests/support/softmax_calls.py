"""The softmax read with its inputs, and its definition as one table of scores, in any dtype."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from scan_reads import free_energies
from torch import Tensor

from fem import functional
from fem.ops.common.tokens import read_tokens
from fem.ops.softmax.cached import cached_read
from fem.priors.kv_cache import KEPT, append, packing_of, within_window


@dataclass(frozen=True)
class SoftmaxCall:
    """A query per key: q (B, T, H, d_k), k, v, f or None (B, T, H_kv, .), beta (H_kv, d_f), bias (H, T, T) or None."""

    arguments: dict[str, Tensor | None]
    causal: bool = True
    window: int | None = None
    place: Tensor | None = None  # of the tokens in the row from which `at` took them

    def tensors(self) -> list[Tensor]:
        return [x for x in self.arguments.values() if x is not None]

    def map(self, change) -> SoftmaxCall:
        return replace(self, arguments={n: None if x is None else change(x) for n, x in self.arguments.items()})

    def set(self, **tensors: Tensor) -> SoftmaxCall:
        return replace(self, arguments=self.arguments | tensors)

    def leaves(self, dtype: torch.dtype | None = None) -> SoftmaxCall:
        return self.map(lambda x: x.detach().to(dtype or x.dtype).clone().requires_grad_())

    def at(self, tokens: Tensor) -> SoftmaxCall:
        q, k, v, _, bias, f = self.arguments.values()
        bias = None if bias is None else bias[:, tokens][:, :, tokens]
        chosen = self.set(q=q[:, tokens], k=k[:, tokens], v=v[:, tokens], bias=bias, f=_at(f, tokens))
        return replace(chosen, place=tokens)

    def rows(self, rows: slice, keys: slice, marks: dict[str, Tensor]):
        """The read of some queries over some keys."""
        q, k, v, beta, bias, f = self.arguments.values()
        bias = None if bias is None else bias[:, rows, keys]
        how = {name: mark[:, keys] for name, mark in marks.items()} | {"window": self.window, "bias": bias}
        q, k, v = q[:, rows], k[:, keys], v[:, keys]
        return functional.softmax_read(q, k, v, beta, self.causal, free_values=_at(f, keys), **how)

    def read(self, **marks: Tensor):
        return self.rows(slice(None), slice(None), marks)

    def in_pieces(self, *sizes: int, **marks: Tensor):
        """Queries by pieces: of a causal read over the keys up to them, of any other over all keys."""
        reads, first = [], 0
        for size in sizes:
            keys = slice(0, first + size if self.causal else None)
            reads.append(self.rows(slice(first, first + size), keys, marks))
            first += size
        return functional.Read(*(torch.cat(parts, 1) for parts in zip(*reads)))

    def streams(self) -> bool:
        return self.causal and self.arguments["bias"] is None

    def streamed(self, *sizes: int, key_mask=None, segment_ids=None):
        """The causal read by the cache that a layer keeps, without gradients."""
        q, k, v, beta, _, f = self.arguments.values()
        memory, cache_position, reads, first = {}, None, [], 0
        for size in sizes:
            piece = slice(first, first + size)
            marks = (None if mark is None else mark[:, piece] for mark in (key_mask, segment_ids))
            tokens, cache_position = read_tokens((1, size), v.device, *marks, cache_position, "key_mask")
            memory = append(memory, k[:, piece], v[:, piece], beta, tokens, self.window is not None, _at(f, piece))
            keys, values = (memory[name] for name in KEPT)
            seen = type(tokens)(memory.get("keep"), None, memory.get("document"), None)
            how = {"window": self.window, "tokens": seen, "split": f is not None}
            reads.append(cached_read(q[:, piece], keys, values, beta, packing_of(memory), **how))
            memory = memory if self.window is None else within_window(memory, self.window)
            first += size
        return functional.Read(*(torch.cat(parts, 1) for parts in zip(*reads)))

    def largest_score(self) -> float:
        """At most."""
        q, k = (self.arguments[name].detach().norm(dim=-1).amax().item() for name in "qk")
        return q * k * self.arguments["q"].shape[-1] ** -0.5

    def definition(self):
        """The read from a table of all scores, in the dtype of the inputs; a query that sees no key reads 0."""
        q, k, v, beta, bias, f = self.arguments.values()
        groups, time = q.shape[2] // k.shape[2], q.shape[1]
        f = (v if f is None else f).repeat_interleave(groups, 2)
        k, v, beta = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2), beta.repeat_interleave(groups, 0)
        scores = (q.unsqueeze(2) * k.unsqueeze(1)).sum(-1) * q.shape[-1] ** -0.5
        if bias is not None:
            scores = scores + bias.permute(1, 2, 0)
        place = torch.arange(time) if self.place is None else self.place
        away = place[:, None] - place
        seen = (away >= 0) if self.causal else torch.ones_like(away, dtype=torch.bool)
        seen &= torch.ones_like(seen) if self.window is None else away.abs() < self.window
        seen = seen[None, :, :, None] & (scores.detach() > -torch.inf)
        empty = ~seen.any(2, keepdim=True)
        log_p = torch.where(seen, scores, -torch.inf).masked_fill(empty, 0.0).log_softmax(2).unsqueeze(-1)
        read = (log_p.exp() * v.unsqueeze(1)).sum(2), free_energies(log_p, f.unsqueeze(1), beta)[1]
        return functional.Read(*(part.masked_fill(empty[:, :, 0, :, None], 0.0) for part in read))


def softmax_call(
    time: int,
    heads=2,
    groups=1,
    keys=3,
    width=3,
    beta=2.0,
    spread=1.0,
    scores=1.0,
    bias=None,
    causal=True,
    window=None,
    free=None,
):
    """Values of that spread, scores of that size and, where `bias` is a share, a bias that forbids such a part.

    free: how many values of their own have a free energy; None: all have.
    """
    normal = lambda *shape: torch.randn(*shape, dtype=torch.float64)  # noqa: E731
    q, k = normal(1, time, heads, keys), normal(1, time, heads // groups, keys)
    q = q * (scores / (q.norm(dim=-1).amax() * k.norm(dim=-1).amax() * keys**-0.5))
    forbids = None
    if bias is not None:
        forbids = normal(heads, time, time).masked_fill(torch.rand(heads, time, time) < bias, -torch.inf)
    arguments = {
        "q": q, "k": k, "v": spread * normal(1, time, heads // groups, width),
        "beta": beta * (0.5 + torch.rand(heads // groups, free or width, dtype=torch.float64)), "bias": forbids,
        "f": None if free is None else spread * normal(1, time, heads // groups, free),
    }  # fmt: skip
    return SoftmaxCall(arguments, causal, window)


def _at(x: Tensor | None, tokens) -> Tensor | None:
    return None if x is None else x[:, tokens]
