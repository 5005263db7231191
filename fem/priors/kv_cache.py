"""What softmax attention remembers: the keys and values of every token that a later one can still see."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from fem.ops.common.tokens import Tokens
from fem.state import CACHED as KEPT  # (B, H, T, d) each: a row of queries reads them at the speed of memory

Memory = dict[str, Tensor]

RECENT = "recent "
_MOST_RECENT = 256


def append(
    memory: Memory, k: Float[Tensor, "b t h dk"], v: Float[Tensor, "b t h dv"], tokens: Tokens, with_position: bool
) -> Memory:
    """The memory with the tokens behind it, and, only once a call brought them, their mask, document and position.

    The last tokens, up to 256 of them, lie in a piece of their own, so that one token more does not copy all before.
    """
    incoming = dict(zip(KEPT, (k.transpose(1, 2), v.transpose(1, 2))))
    if not memory:
        kept = {name: tensor.contiguous() for name, tensor in incoming.items()}
    else:
        recent = memory[RECENT + "key"].shape[2] if RECENT + "key" in memory else 0
        grows = not with_position and recent + k.shape[1] <= _MOST_RECENT
        kept = {}
        for name, tensor in incoming.items():
            long, *short = pieces(memory, name)
            if grows:
                kept |= {name: long, RECENT + name: torch.cat([*short, tensor], 2)}
            else:
                kept[name] = torch.cat([long, *short, tensor], 2)
    return kept | _marks(memory, k, tokens, with_position)


def pieces(memory: Memory, name: str) -> list[Float[Tensor, "b h _t d"]]:
    """The keys or the values, oldest first."""
    return [memory[part] for part in (name, RECENT + name) if part in memory]


def _marks(memory: Memory, k: Tensor, tokens: Tokens, with_position: bool) -> Memory:
    rows, new = k.shape[:2]
    plain = {"keep": k.new_ones(rows, 1, dtype=torch.bool), "document": k.new_zeros(rows, 1, dtype=torch.long)}
    incoming = {}
    if "keep" in memory or tokens.keep is not None:
        incoming["keep"] = plain["keep"].expand(-1, new) if tokens.keep is None else tokens.keep.clone()
    if "document" in memory or tokens.start is not None:
        incoming["document"] = plain["document"].expand(-1, new) if tokens.document is None else tokens.document
    if with_position:
        incoming["position"] = tokens.position.expand(rows, -1)
    if not memory:
        return incoming
    old = sum(piece.shape[2] for piece in pieces(memory, "key"))
    before = lambda name: memory[name] if name in memory else plain[name].expand(-1, old)  # noqa: E731
    return {name: torch.cat([before(name), tensor], 1) for name, tensor in incoming.items()}


def within_window(memory: Memory, window: int) -> Memory:
    """The last `window - 1` kept tokens of every row, in order: all that a next token can see."""
    old = memory["key"].shape[2]
    room = min(window - 1, old)
    axis = lambda name: 2 if name in KEPT else 1  # noqa: E731
    if "keep" not in memory:
        return {name: tensor.narrow(axis(name), old - room, room) for name, tensor in memory.items()}
    last = memory["keep"].long().argsort(dim=1, stable=True)[:, old - room :]
    index = lambda name: last[:, None, :, None] if name in KEPT else last  # noqa: E731
    return {name: tensor.take_along_dim(index(name), axis(name)) for name, tensor in memory.items()}
