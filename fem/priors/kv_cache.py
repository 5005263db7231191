"""What softmax attention remembers: the keys of every token that a later one can still see, and on a CPU [v | e] of its
values, on other devices the values.

e = exp(beta (f - c)), f the values whose free energy is read, is written once, when the token arrives, so that a later
token reads the cache by attention (`fem/ops/softmax/cached.py`). The shift c and beta are those of the stream's
first tokens. Without a free energy, and in float16, where e overflows, the values are cached as they come. So is an f
of its own, [v | f], where e could not give it back: under gradients, and beyond e's range.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from fem.ops.common.backend import by_kernels, transformed
from fem.ops.common.precision import upcast
from fem.ops.common.shared import shared
from fem.ops.common.tokens import Tokens
from fem.ops.softmax.cached import fixed_packing, from_cache, pack_exactly
from fem.ops.softmax.packing import Packing
from fem.state import CACHED as KEPT  # (B, H, T, d) each: a row of queries reads them at the speed of memory

Memory = dict[str, Tensor]

_TIME = dict.fromkeys(KEPT, 2) | {"keep": 1, "document": 1}  # the axis of the tokens
PACKED = ("shift", "beta", "small")  # (B, H, 1, d_f) each, where the values are [v | e]; small: only if some beta is


def append(
    memory: Memory,
    k: Float[Tensor, "b t h dk"],
    v: Float[Tensor, "b t h dv"],
    beta: Float[Tensor, "h df"] | None,
    tokens: Tokens,
    windowed: bool,
    free_values: Float[Tensor, "b t h df"] | None = None,
) -> Memory:
    """The memory with the tokens behind it, and, only once a call brought them, their mask and document."""
    k, v, f = (None if x is None else x.transpose(1, 2) for x in (k, v, free_values))
    marks = _marks(memory, k, tokens)
    if tokens.keep is not None:
        hidden = ~tokens.keep[:, None, :, None]
        k, v, f = (None if x is None else x.masked_fill(hidden, 0.0) for x in (k, v, f))
    start = {name: memory[name] for name in PACKED if name in memory}
    if not memory and beta is not None and v.dtype != torch.float16 and v.device.type == "cpu":
        start = _start(v if f is None else f, beta, tokens.keep)
    values = pack_exactly(v, f, packing_of(start)) if start else None
    if values is None:
        if memory and start:  # [v | e] so far
            pair = from_cache(memory["value"], packing_of(start), True, start["shift"].shape[-1])
            memory = memory | {"value": torch.cat(pair, -1)}
        start, values = {}, v if f is None else torch.cat([v, f], -1)
    caches = [memory[name] if memory else x[:, :, :0] for name, x in zip(KEPT, (k, values))]
    return dict(zip(KEPT, _longer(caches, (k, values), windowed))) | marks | start


def _longer(caches: Sequence[Tensor], new: tuple[Tensor, Tensor], windowed: bool) -> Sequence[Tensor]:
    """The caches of keys and values with new ones behind them: in the buffers that they begin, or copied where a
    gradient, a graph or another dtype forbids that, or a window lets go of them."""
    copied = windowed or torch.is_grad_enabled() or torch.compiler.is_compiling() or transformed(*new, *caches)
    if copied or any(cache.dtype != x.dtype for cache, x in zip(caches, new)):
        return [torch.cat(pair, 2) for pair in zip(caches, new)]
    longer, places = zip(*(_with_place(cache, new[0].shape[2]) for cache in caches))
    if new[0].shape[2] == 1 and by_kernels(*new, *places):
        from fem.ops.common.token_kernels import append_token  # by Triton, which the library does not require

        append_token(*new, *places)
    else:
        for x, place in zip(new, places):
            place.copy_(x)
    return longer


def packing_of(memory: Memory) -> Packing | None:
    """The packing of a memory's values, or None where they are as they came."""
    return Packing(memory["beta"], memory["shift"], memory.get("small")) if "shift" in memory else None


def within_window(memory: Memory, window: int | None) -> Memory:
    """The last `window - 1` tokens, all that a next token can see; without a window all."""
    if window is None:
        return memory
    time = memory["key"].shape[2]
    first = max(0, time - window + 1)
    return {name: x if name in PACKED else x.narrow(_TIME[name], first, time - first) for name, x in memory.items()}


@torch.no_grad()
def _start(f: Float[Tensor, "b h t d"], beta: Float[Tensor, "h d"], keep: Tensor | None) -> Memory:
    """The shift of a stream, the mean of its first values, and its beta."""
    f = upcast(f)
    count = f.shape[2] if keep is None else keep.sum(1).clamp_min(1)[:, None, None, None]
    shift = f.sum(2, keepdim=True) / count
    beta = beta.detach().to(f.dtype)[:, None].expand_as(shift).clone(memory_format=torch.contiguous_format)
    packing = fixed_packing(beta, shift)
    return {"shift": packing.shift, "beta": beta} | ({} if packing.small is None else {"small": packing.small})


def _marks(memory: Memory, k: Float[Tensor, "b h t d"], tokens: Tokens) -> Memory:
    """Mask and documents from the first call on that brings them: before it all were kept, and of document 0."""
    old, marks = memory["key"].shape[2] if memory else 0, {}
    keep, document = (tokens.keep, tokens.keep, True), (tokens.start, tokens.document, 0)
    for name, (brought, mark, usual) in {"keep": keep, "document": document}.items():
        if name in memory or brought is not None:
            parts = (memory.get(name), old), (mark, k.shape[2])
            parts = [_filled((k.shape[0], n), usual, k.device) if x is None else x for x, n in parts]
            marks[name] = _joined(*parts)
    return marks


@shared
def _filled(shape: tuple[int, int], value: bool | int, device: torch.device) -> Tensor:
    return torch.full(shape, value, device=device)


@shared
def _joined(before: Tensor, new: Tensor) -> Tensor:
    """The marks of a cache and of the tokens behind it: the same tensor for all layers of a model."""
    return torch.cat([before, new], 1)


_rooms = WeakIdKeyDictionary()  # by a cache, until it is gone: the buffer that it begins, and True for who first asks


def _with_place(cache: Float[Tensor, "b h t d"], count: int) -> tuple[Tensor, Tensor]:
    """The cache, which is not changed, with a place for so many tokens behind it, and that place: where its buffer has
    room, or in one with an eighth more room.

    The place behind a cache is given to one continuation, and in one thread, as `next` is one step; others copy.
    """
    time, end = cache.shape[2], cache.shape[2] + count
    buffer, first = _rooms.get(cache, (cache, iter(())))
    writable = torch.is_inference_mode_enabled() or not buffer.is_inference()
    if not (writable and end <= buffer.shape[2] and next(first, False)):
        buffer = cache.new_empty(*cache.shape[:2], end + end // 8, cache.shape[3])
        buffer[:, :, :time] = cache
    longer = buffer.narrow(2, 0, end)
    _rooms[longer] = buffer, iter((True,))
    return longer, buffer.narrow(2, time, count)
