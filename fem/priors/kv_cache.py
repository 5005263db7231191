"""What softmax attention remembers: the keys of every token that a later one can still see, and [v | e] of its values.

e = exp(beta (v - c)) is written once, when the token arrives, so that a later token reads the cache by attention alone
(`fem/ops/softmax/cached.py`). The shift c and beta are those of the stream's first tokens. Without a free energy, and
in float16, whose range e would leave, the values stand alone.
"""

from __future__ import annotations

from math import isfinite, isqrt

import torch
from jaxtyping import Float
from torch import Tensor

from fem.ops.common.precision import wide
from fem.ops.common.tokens import Tokens
from fem.ops.softmax.cached import pack_to_be_proven
from fem.state import CACHED as KEPT  # (B, H, T, d) each: a row of queries reads them at the speed of memory

Memory = dict[str, Tensor]

PACKED = ("shift", "beta")  # (B, H, 1, d_v) each, where the values are [v | e]
RECENT = "recent "
_MOST_RECENT = 256


def append(
    memory: Memory,
    k: Float[Tensor, "b t h dk"],
    v: Float[Tensor, "b t h dv"],
    beta: Float[Tensor, "h dv"] | None,
    tokens: Tokens,
    with_position: bool,
) -> Memory:
    """The memory with the tokens behind it, and, only once a call brought them, their mask, document and position.

    The last tokens lie in a piece of their own, so that one token more does not copy all before: at most 256 of them,
    and about as many as make both copies cheap.
    """
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    marks = _marks(memory, k, tokens, with_position)
    if tokens.keep is not None:
        hidden = ~tokens.keep[:, None, :, None]
        k, v = k.masked_fill(hidden, 0.0), v.masked_fill(hidden, 0.0)
    if beta is not None and v.dtype != torch.float16:
        if memory and "shift" not in memory:  # written by a version that kept v alone
            memory = memory | _start(memory["value"], beta, memory.get("keep"))
            memory |= {name: _packed(memory[name], memory) for name in ("value", RECENT + "value") if name in memory}
        start = memory if memory else _start(v, beta, tokens.keep)
        v = _packed(v, start, k)
        marks |= {name: start[name] for name in PACKED}
    elif "shift" in memory:  # of a stream in a wider dtype
        memory = {name: x[..., : v.shape[3]] if name.endswith("value") else x for name, x in memory.items()}
    if not memory:
        return {"key": k.contiguous(), "value": v.contiguous()} | marks
    kept, old = {}, memory["key"].shape[2]
    recent = memory[RECENT + "key"].shape[2] if RECENT + "key" in memory else 0
    grows = not with_position and recent + k.shape[2] <= min(_MOST_RECENT, max(16, isqrt(2 * old)))
    for name, tensor in zip(KEPT, (k, v)):
        long, *short = pieces(memory, name)
        if grows:
            kept |= {name: long, RECENT + name: torch.cat([*short, tensor], 2) if short else tensor.contiguous()}
        else:
            kept[name] = torch.cat([long, *short, tensor], 2)
    return kept | marks


def pieces(memory: Memory, name: str) -> list[Float[Tensor, "b h _t d"]]:
    """The keys or the values, oldest first."""
    return [memory[part] for part in (name, RECENT + name) if part in memory]


@torch.no_grad()
def _start(v: Float[Tensor, "b h t d"], beta: Float[Tensor, "h d"], keep: Tensor | None) -> Memory:
    """The shift of a stream, the mean of its first values, and its beta."""
    v = wide(v)
    count = v.shape[2] if keep is None else keep[:, : v.shape[2]].sum(1).clamp_min(1)[:, None, None, None]
    shift = (v.sum(2, keepdim=True) / count).nan_to_num(0.0, 0.0, 0.0)
    return {"shift": shift, "beta": beta.to(v.dtype)[:, None].expand_as(shift).contiguous()}


def _packed(v: Float[Tensor, "b h t d"], start: Memory, k: Tensor | None = None) -> Float[Tensor, "b h t w"]:
    """[v | e], e without gradient: who wants one reads v itself. NaN where the key is not finite."""
    with torch.no_grad():
        packed = pack_to_be_proven(v, start["beta"], start["shift"])
        looks = k is not None and k.device.type == "cpu" and not torch.compiler.is_compiling()
        if k is not None and not (looks and isfinite(k.sum().item())):
            packed.masked_fill_(~k.isfinite().all(-1, keepdim=True), torch.nan)
    return torch.cat([v, packed[..., v.shape[-1] :]], -1) if v.requires_grad else packed


def _marks(memory: Memory, k: Float[Tensor, "b h t d"], tokens: Tokens, with_position: bool) -> Memory:
    rows, new = k.shape[0], k.shape[2]
    incoming = {}
    if "keep" in memory or tokens.keep is not None:
        incoming["keep"] = k.new_ones(rows, new, dtype=torch.bool) if tokens.keep is None else tokens.keep.clone()
    if "document" in memory or tokens.start is not None:
        none = tokens.document is None
        incoming["document"] = k.new_zeros(rows, new, dtype=torch.long) if none else tokens.document
    if with_position:
        incoming["position"] = tokens.position.expand(rows, -1)
    if not memory or not incoming:
        return incoming
    old = sum(piece.shape[2] for piece in pieces(memory, "key"))
    plain = {"keep": lambda: k.new_ones(rows, old, dtype=torch.bool)}
    plain["document"] = lambda: k.new_zeros(rows, old, dtype=torch.long)
    before = lambda name: memory[name] if name in memory else plain[name]()  # noqa: E731
    return {name: torch.cat([before(name), tensor], 1) for name, tensor in incoming.items()}


def within_window(memory: Memory, window: int) -> Memory:
    """The last `window - 1` kept tokens of every row, in order: all that a next token can see."""
    old = memory["key"].shape[2]
    room = min(window - 1, old)
    axis = lambda name: 2 if name in KEPT else 1  # noqa: E731
    whole = {name: memory[name] for name in PACKED if name in memory}
    by_token = {name: tensor for name, tensor in memory.items() if name not in PACKED}
    if "keep" not in memory:
        return {name: tensor.narrow(axis(name), old - room, room) for name, tensor in by_token.items()} | whole
    last = memory["keep"].long().argsort(dim=1, stable=True)[:, old - room :]
    index = lambda name: last[:, None, :, None] if name in KEPT else last  # noqa: E731
    return {name: tensor.take_along_dim(index(name), axis(name)) for name, tensor in by_token.items()} | whole
