"""A scan as one operator with its gradient: slab of time by slab of time, each computed again for its gradient.

Training keeps the memory at the slabs' borders only. torch.compile does not look into the operator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fem.ops.common.backend import differentiated, portable, transformed
from fem.ops.common.operator import again_differentiable, operator, recorded
from fem.ops.common.precision import double, fallbacks, needs_float64, upcast, without_autocast
from fem.ops.common.read import Terms, connected_zeros
from fem.ops.common.steps import along_time

KERNELS, STATELESS = 1, 2  # of a call by kernels: whether its memory holds anything, or is wanted after it


class SlabScan:
    """A scan of a named tuple of inputs: those up to f are along time, (B, T, ..), and others shared, beta the last.

    A subclass says what a slab and a step do, and how many tokens a slab has. A memory is what cells have read so far.
    """

    name: str
    Inputs: type

    def __init__(self):
        fields = self.Inputs._fields
        self.time, self.count = fields.index("f") + 1, len(fields)
        inputs = ", ".join(f"Tensor? {x}" for x in fields)
        memory = ", ".join(f"Tensor memory_{x}" for x in Terms._fields)  # inductor refuses two arguments of one name
        self.forward = operator(f"{self.name}({inputs}, {memory}, int kernels) -> Tensor[]")(self._forward)
        backward = f"{self.name}_backward(Tensor?[] grads, bool[] wanted, {inputs}, {memory}, int kernels) -> Tensor[]"
        self.backward = operator(backward)(self._backward)
        self.forward.register_fake(self._empty)
        self.backward.register_fake(self._empty_gradients)
        self.forward.register_autograd(self._differentiate, setup_context=self._save)

    def slab(self, memory: Terms, kernels: int, x) -> tuple[Terms, Terms, int] | None:
        """What a slab reads, the memory after it, and how many of its entries were computed again, or None where that
        is in doubt. kernels: not 0 where they read the whole call as one slab, of inputs in any dtype, in v's dtype."""
        raise NotImplementedError

    def step(self, memory: Terms, x) -> tuple[Terms, Terms]:
        """What one token reads, (B, 1, ..), and the memory after it, by operations that PyTorch can export and
        differentiate any number of times, or by kernels, which take 16 bits."""
        raise NotImplementedError

    def size(self, x) -> int:
        """Tokens of a slab; under a compiler a symbol."""
        raise NotImplementedError

    def exact(self, memory: Terms, x) -> tuple[Terms, Terms]:
        """`step` of any number of tokens: one after another."""
        shared = x[self.time :]

        def token(before: list[Tensor], *tokens: Tensor | None):
            read, after = self.step(Terms(*before), self.Inputs(*tokens, *shared))
            return list(after), list(read)

        last, rows = along_time(token, list(memory), *x[: self.time])
        return Terms(*rows), Terms(*last)

    def rough(self, x) -> bool:
        """Whether other inputs than the values ask for float64."""
        return False

    def __call__(self, memory: Terms, backend: str, x, stateless: bool = False) -> tuple[Terms, Terms]:
        """What every token reads, and the memory after the last."""
        kernels = 0 if backend != "triton" else STATELESS if stateless else KERNELS
        if 0 in x.v.shape[:2]:
            shapes = (y.shape for y in self._empty_results(x, memory, kernels)[:3])
            return Terms(*(connected_zeros(x.v, shape, *x, *memory) for shape in shapes)), memory
        with without_autocast(x.v.device):
            if portable():  # a graph that holds one step
                return SlabScan.exact(self, memory, self._cast(x, upcast))
            if x.v.shape[1] == 1 and not differentiated(*x, *memory):  # others take more launches, and wait
                return self.step(memory, x)
            if backend == "reference" or transformed(*x, *memory):
                return self.exact(memory, self._cast(x, upcast))
            if kernels and not torch.compiler.is_compiling():
                if (found := self.slab(memory, kernels, x)) is not None:
                    fallbacks.count(x.f.numel(), 0)
                    return found[:2]
                x, kernels = self._cast(x, upcast), 0
        out = self.forward(*x, *memory, kernels)
        return Terms(*out[:3]), Terms(*out[3:6])

    def _parts(self, arguments: Sequence) -> tuple:
        """The inputs, the memory and `kernels` of an operator's arguments."""
        return self.Inputs(*arguments[: self.count]), Terms(*arguments[self.count : -1]), arguments[-1]

    def _slabs(self, x, kernels: int) -> list[slice]:
        time = x.f.shape[1]
        size = time if kernels else self.size(x)
        return [slice(start, start + size) for start in range(0, time, size)]

    def _cut(self, x, piece: slice):
        along, shared = x[: self.time], x[self.time :]
        return self.Inputs(*(part if part is None else part[:, piece] for part in along), *shared)

    def _cast(self, x, widen: Callable[[Tensor], Tensor]):
        return self.Inputs(*(y if y is None or not y.is_floating_point() else widen(y) for y in x))

    def _in_float64(self, x) -> bool:
        """Whether float32 would cost digits."""
        if x.f.dtype != torch.float32 or x.f.device.type == "mps":
            return False
        return needs_float64(x.f, x.beta) or self.rough(x)

    def _read(self, memory: Terms, kernels: int, x) -> tuple[Terms, Terms, int]:
        """`slab`, or `exact` where that is in doubt; a call that kernels cannot read is cut into slabs of its own."""
        if (found := self.slab(memory, kernels, x)) is not None:
            return found
        if not kernels:
            return *self.exact(memory, x), x.f.numel()
        dtype = memory.mean.dtype
        reads, borders, again = self._by_slabs(memory, self._cast(x, upcast))
        read = Terms(*(torch.cat(parts, 1).to(dtype) for parts in zip(*reads)))
        return read, Terms(*(part.to(dtype) for part in borders[-1])), again

    def _by_slabs(self, memory: Terms, x) -> tuple[list[Terms], list[Terms], int]:
        """What slabs read, the memory at their borders, and how many entries were computed again."""
        pieces = self._slabs(x, 0)
        if self._in_float64(x):
            x, memory = self._cast(x, Tensor.double), Terms(*double(*memory))
        reads, borders, again = [], [memory], 0
        for piece in pieces:
            read, memory, more = self._read(memory, 0, self._cut(x, piece))
            reads.append(read)
            borders.append(memory)
            again += more
        return reads, borders, again

    def _forward(self, *arguments):
        """The reads of all tokens, the memory after the last, and the memory at every border between slabs."""
        x, memory, kernels = self._parts(arguments)
        dtype = memory.mean.dtype
        with torch.no_grad(), without_autocast(memory.mean.device):
            if kernels:
                read, after, again = self._read(memory, kernels, x)
                fallbacks.count(read.free_energy.numel(), again)
                pairs = zip((*read, *after), self._empty_results(x, memory, kernels))
                return [*(y.to(z.dtype).contiguous() for y, z in pairs), *(y.new_empty(0, *y.shape) for y in memory)]
            reads, borders, again = self._by_slabs(memory, x)
        out = [(torch.cat(parts, 1) if len(parts) > 1 else parts[0].contiguous()).to(dtype) for parts in zip(*reads)]
        fallbacks.count(out[2].numel(), again)
        borders = [torch.stack([x.to(dtype) for x in parts]) for parts in zip(*borders)]
        return [*out, *(x[-1].clone() for x in borders), *borders]

    def _empty_results(self, x, memory: Terms, kernels: int) -> list[Tensor]:
        """What every token reads, and the memory after the last."""
        like = x.v if kernels else memory.mean
        reads = (memory.mean, memory.log_weight), (like, x.v), (like, x.f)
        reads = [one.new_empty(*x.v.shape[:-1], other.shape[-1]) for one, other in reads]
        return [*reads, *(part.new_empty(part.shape) for part in memory)]

    def _empty(self, *arguments):
        x, memory, kernels = self._parts(arguments)
        time, size = x.f.shape[1], self.size(x)
        count = 0 if kernels else (time + size - 1) // size + 1
        return [*self._empty_results(x, memory, kernels), *(part.new_empty(count, *part.shape) for part in memory)]

    def _backward(self, grads, wanted, *arguments):
        """Gradients of the memory and of the inputs: each slab is read again from its border, the last one first."""
        x, borders, kernels = self._parts(arguments)
        dtype, d_reads, d_memory = borders.mean.dtype, grads[:3], grads[3:]
        asked = [n for n, w in enumerate(wanted) if w and x[n] is not None]
        dtypes = [x[n].dtype for n in asked]
        if not kernels and self._in_float64(x):
            x, borders = self._cast(x, Tensor.double), Terms(*double(*borders))
            d_reads, d_memory = double(*d_reads), double(*d_memory)
        found: list[Tensor] = []
        for number, piece in reversed(list(enumerate(self._slabs(x, kernels)))):
            before, given = Terms(*(part[number] for part in borders)), self._cut(x, piece)
            pull = [None if d is None else d[:, piece] for d in d_reads]
            d_memory, parts = self._slab_gradients(before, kernels, given, asked, pull, d_memory)
            if kernels:
                found = [part.contiguous() for part in parts]
                continue
            found = found or [_total(x[n], along_time=n < self.time) for n in asked]
            for n, total, part in zip(asked, found, parts):
                if n < self.time:
                    total[:, piece] = part
                else:
                    total += part
        return [*(y.to(dtype).clone() for y in d_memory), *(total.to(kept) for total, kept in zip(found, dtypes))]

    def _slab_gradients(
        self, memory: Terms, kernels: int, x, asked: list[int], d_read: Sequence, d_after: Sequence
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Gradients of the memory before a slab, and of the inputs that are asked for."""
        with recorded(), without_autocast(memory.mean.device):
            x = self.Inputs(*(None if part is None else part.detach() for part in x))
            memory = Terms(*(part.detach().requires_grad_() for part in memory))
            leaves = [*memory, *(x[n].requires_grad_() for n in asked)]
            read, after, _ = self._read(memory, kernels, x)
            pairs = zip((*read, *after), (*d_read, *d_after))
            pairs = [(y, d.to(y.dtype)) for y, d in pairs if d is not None and y.requires_grad]
            outputs, cotangents = zip(*pairs)
            found = torch.autograd.grad(outputs, leaves, cotangents, materialize_grads=True)
        return found[:3], found[3:]

    def _empty_gradients(self, grads, wanted, *arguments):
        x, borders, _ = self._parts(arguments)
        asked = [y for y, w in zip(x, wanted) if y is not None and w]
        return [*(y.new_empty(y.shape[1:]) for y in borders), *(y.new_empty(y.shape) for y in asked)]

    def _save(self, ctx, inputs, output):
        *tensors, ctx.kernels = inputs
        ctx.save_for_backward(*tensors, *output[6:])
        ctx.set_materialize_grads(False)

    def _differentiate(self, ctx, grads):
        if all(grad is None for grad in grads[:6]):  # as of a function whose backward returns None
            return (None,) * len(ctx.needs_input_grad)
        saved = ctx.saved_tensors  # read once: checkpointing hands it out but once
        inputs, memory, borders = saved[: self.count], saved[self.count : -3], saved[-3:]
        borders = [x.unsqueeze(0) for x in memory] if ctx.kernels else borders
        if torch.is_grad_enabled():
            return *again_differentiable(self.again, [*inputs, *memory], grads[:6]), None
        wanted = list(ctx.needs_input_grad[: self.count])
        found = self.backward(list(grads[:6]), wanted, *inputs, *borders, ctx.kernels)
        remaining = iter(found[3:])
        d_inputs = [next(remaining) if x is not None and w else None for x, w in zip(inputs, wanted)]
        return *d_inputs, *found[:3], None

    def again(self, *tensors):
        """The exact results in float64, whose second derivatives need digits that float32 has not."""
        read, memory = self.exact(
            Terms(*double(*tensors[self.count :])), self._cast(tensors[: self.count], Tensor.double)
        )
        return [*read, *memory]


def _total(x: Tensor, along_time: bool) -> Tensor:
    """Room for an input's gradient: of tokens each slab writes its own, of others each adds to it."""
    make = torch.empty_like if along_time else torch.zeros_like
    return make(x, memory_format=torch.contiguous_format)
