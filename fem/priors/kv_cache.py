"""What softmax attention remembers: the keys of every token that a later one can still see, and on a CPU [v | e] of its
values, on other devices the values.

e = exp(beta (f - c)), f the values whose free energy is read, is written once, when the token arrives, so that a later
token reads the cache by attention (`fem/ops/softmax/cached.py`). The shift c and beta are those of the stream's
first tokens. Without a free energy, and in float16, where e overflows, the values are cached as they come. So is an f
of its own, [v | f], where e could not give it back: under gradients, and beyond e's range.
"""

from __future__ import annotations

import weakref

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from fem.ops.common.packing import Packing
from fem.ops.common.precision import upcast
from fem.ops.common.tokens import Tokens
from fem.ops.common.transforms import may_look, transformed
from fem.ops.softmax.cached import LARGEST, PROVEN, fixed_packing, pack_to_be_proven, unpacked
from fem.state import CACHED as KEPT  # (B, H, T, d) each: a row of queries reads them at the speed of memory

Memory = dict[str, Tensor]

PACKED = ("shift", "beta", "small")  # (B, H, 1, d_v) each, where the values are [v | e]; small: only if some beta is
_LEAST = 60.0  # nats: e^-60 times a weight of e^-27 is still a normal number of float32
STREAM = {*KEPT, "shift", "beta"}  # all that a plain stream keeps: neither marks nor a small beta


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
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    f = None if free_values is None else free_values.transpose(1, 2)
    marks = _marks(memory, k, tokens)
    if tokens.keep is not None:
        hidden = ~tokens.keep[:, None, :, None]
        k, v, f = (None if x is None else x.masked_fill(hidden, 0.0) for x in (k, v, f))
    start = {name: memory[name] for name in PACKED if name in memory}
    if not memory and beta is not None and v.dtype != torch.float16 and v.device.type == "cpu":
        start = _start(v if f is None else f, beta, tokens.keep)
    if start and f is not None and not _recoverable(f, start):
        memory, start = in_values(memory), {}
    if start:
        v = _packed(v, f, start)
    elif f is not None:
        v = torch.cat([v, f], -1)
    if not memory:
        return {"key": k.contiguous(), "value": v.contiguous()} | marks | start
    plain = not (windowed or torch.is_grad_enabled() or torch.compiler.is_compiling())
    if not plain or transformed(k, v, memory["key"], memory["value"]):
        return _joined(memory, k, v) | marks | start
    return _extended(memory["key"], memory["value"], k, v) | marks | start


def packing_of(memory: Memory) -> Packing | None:
    """The packing of a memory's values, or None where they are as they came."""
    return Packing(memory["beta"], memory["shift"], memory.get("small")) if "shift" in memory else None


def append_one(
    memory: Memory,
    k: Float[Tensor, "b h 1 dk"],
    v: Float[Tensor, "b h 1 dv"],
    f: Float[Tensor, "b h 1 df"] | None,
) -> Memory | None:
    """`append` of one token to a plain `STREAM`, on a CPU and without gradients; None where it cannot stay packed."""
    start = {"shift": memory["shift"], "beta": memory["beta"]}
    z = (upcast(v if f is None else f) - start["shift"]) * start["beta"]
    if f is not None and not _within_reach(z):
        return None
    e = z.exp()
    packed = torch.cat([v, e.to(v.dtype)], -1) if e.sum().item() <= LARGEST else _packed(v, f, start)
    return start | _extended(memory["key"], memory["value"], k, packed)


def _recoverable(f: Tensor, start: Memory) -> bool:
    """Whether f can be computed back from e, which then replaces it: no gradient is wanted, and e is a number."""
    if f.requires_grad or not may_look(f):
        return False
    z, small = packing_of(start).exponents(upcast(f)), start.get("small")
    return _within_reach(z if small is None else torch.where(small, PROVEN * z, z))  # exp(z) - 1 wants |z| < 1


def _within_reach(z: Tensor) -> bool:
    """Whether no e exceeds e^30, what `proven` asks for, and all are normal numbers of float32."""
    if not z.numel():
        return True
    low, high = z.aminmax()
    return low.item() > -_LEAST and high.item() < PROVEN


def in_values(memory: Memory) -> Memory:
    """The memory with [v | f] in the place of [v | e]."""
    if not memory:
        return memory
    scheme = packing_of(memory)
    values = torch.cat(unpacked(memory["value"], scheme, True, scheme.shift.shape[-1]), -1)
    return {name: x for name, x in memory.items() if name not in PACKED} | {"value": values}


class _Room:
    """Buffers that start with a cache and have room for an eighth more tokens; only one continuation may use it."""

    def __init__(self, key: Float[Tensor, "b h t dk"], value: Float[Tensor, "b h t w"], end: int):
        self.size = end + end // 8
        self.key, self.value = (self._buffer(cache) for cache in (key, value))
        self.of_inference = self.key.is_inference()
        self.free: set[int] = set()

    def _buffer(self, cache: Float[Tensor, "b h t d"]) -> Float[Tensor, "b h _n d"]:
        rows, heads, time, width = cache.shape
        buffer = cache.new_empty(rows, heads, self.size, width)
        buffer[:, :, :time] = cache
        return buffer

    def claim(self, time: int, end: int) -> bool:
        """Whether the caller may write the places from `time` to `end`: they exist, and nobody else has taken them."""
        if end > self.size or (self.of_inference and not torch.is_inference_mode_enabled()):
            return False
        try:
            self.free.remove(time)  # only one thread succeeds
        except KeyError:
            return False
        return True


_rooms = WeakIdKeyDictionary()  # by the keys that a room begins with, until these are gone: its values, and the room


def _extended(
    key: Float[Tensor, "b h t dk"],
    value: Float[Tensor, "b h t w"],
    k: Float[Tensor, "b h n dk"],
    v: Float[Tensor, "b h n w"],
) -> Memory:
    """`_joined`, in place where a room has places behind the cache. `key` and `value` are not changed."""
    if key.dtype != k.dtype or value.dtype != v.dtype:
        return _joined({"key": key, "value": value}, k, v)
    time, new = key.shape[2], k.shape[2]
    end = time + new
    its_value, room = _rooms.get(key, (None, None))
    if room is None or its_value() is not value or not room.claim(time, end):
        room = _Room(key, value, end)
    room.key.narrow(2, time, new).copy_(k)
    room.value.narrow(2, time, new).copy_(v)
    key, value = room.key.narrow(2, 0, end), room.value.narrow(2, 0, end)
    room.free.add(end)
    _rooms[key] = weakref.ref(value), room
    return {"key": key, "value": value}


def _joined(memory: Memory, k: Float[Tensor, "b h n dk"], v: Float[Tensor, "b h n w"]) -> Memory:
    return {name: torch.cat([memory[name], new], 2) for name, new in zip(KEPT, (k, v))}


@torch.no_grad()
def _start(v: Float[Tensor, "b h t d"], beta: Float[Tensor, "h d"], keep: Tensor | None) -> Memory:
    """The shift of a stream, the mean of its first values, and its beta."""
    v = upcast(v)
    count = v.shape[2] if keep is None else keep[:, : v.shape[2]].sum(1).clamp_min(1)[:, None, None, None]
    shift = v.sum(2, keepdim=True) / count
    beta = beta.detach().to(v.dtype)[:, None].expand_as(shift).clone(memory_format=torch.contiguous_format)
    scheme = fixed_packing(beta, shift)
    return {"shift": scheme.shift, "beta": beta} | ({} if scheme.small is None else {"small": scheme.small})


def _packed(v: Tensor, f: Tensor | None, start: Memory) -> Float[Tensor, "b h t w"]:
    """[v | e]. e has no derivative: reads with derivatives start from values."""
    packed = pack_to_be_proven(v.detach(), (v if f is None else f).detach(), packing_of(start))
    return torch.cat([v, packed[..., v.shape[-1] :]], -1) if v.requires_grad or transformed(v) else packed


def _marks(memory: Memory, k: Float[Tensor, "b h t d"], tokens: Tokens) -> Memory:
    rows, new = k.shape[0], k.shape[2]
    incoming = {}
    if "keep" in memory or tokens.keep is not None:
        incoming["keep"] = k.new_ones(rows, new, dtype=torch.bool) if tokens.keep is None else tokens.keep.clone()
    if "document" in memory or tokens.start is not None:
        none = tokens.document is None
        incoming["document"] = k.new_zeros(rows, new, dtype=torch.long) if none else tokens.document
    if not memory or not incoming:
        return incoming
    old = memory["key"].shape[2]
    plain = {"keep": lambda: k.new_ones(rows, old, dtype=torch.bool)}
    plain["document"] = lambda: k.new_zeros(rows, old, dtype=torch.long)
    before = lambda name: memory[name] if name in memory else plain[name]()  # noqa: E731
    return {name: torch.cat([before(name), tensor], 1) for name, tensor in incoming.items()}


def within_window(memory: Memory, window: int) -> Memory:
    """The last `window - 1` tokens: all that a next token can see."""
    old = memory["key"].shape[2]
    room = min(window - 1, old)
    last = lambda name, x: x if name in PACKED else x.narrow(2 if name in KEPT else 1, old - room, room)  # noqa: E731
    return {name: last(name, x) for name, x in memory.items()}
