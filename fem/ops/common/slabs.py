"""A scan as one operator with its gradient: slab of time by slab of time, each computed again for its gradient.

Training keeps the memory at the slabs' borders only. torch.compile does not look into the operator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fem.ops.common.fallback_count import fallbacks
from fem.ops.common.operator import operator
from fem.ops.common.precision import double, needs_float64, upcast, without_autocast
from fem.ops.common.read import Terms, connected_zeros
from fem.ops.common.recorded import recorded
from fem.ops.common.steps import along_time, portable
from fem.ops.common.transforms import again_differentiable, differentiated, transformed


class SlabScan:
    """A scan of inputs along time, (B, T, ..), of which v and f come last, and of shared ones, of which beta does.

    slab(memory, kernels, *inputs): what a slab reads, the memory after it, and how many of its entries were computed
    again, or None where that is in doubt; kernels: not 0 where kernels read the whole call, of inputs in any dtype.
    direct: whether an eager call keeps what autograd needs of kernels, instead of running them again. size(*inputs):
    tokens of a slab. rough(*inputs): whether other inputs than the values ask for float64.
    step(memory, *inputs): what one token reads, (B, 1, ..), and the memory after it, by operations that PyTorch can
    export and differentiate any number of times. exact: the same of any number of tokens; None: one step after another.
    whole: the same by kernels that leave nothing in doubt, in the place of slabs; None: slabs ask kernels themselves.
    """

    def __init__(
        self,
        name: str,
        along: Sequence[str],
        shared: Sequence[str],
        slab: Callable,
        step: Callable,
        size: Callable,
        rough: Callable = lambda *inputs: False,
        exact: Callable | None = None,
        whole: Callable | None = None,
        direct: bool = False,
    ):
        self.time, self.slab, self.step, self.size, self.rough = len(along), slab, step, size, rough
        self.exact, self.whole, self.direct = exact or self.by_steps, whole, direct
        self.count = len(along) + len(shared)
        inputs = ", ".join(f"Tensor? {x}" for x in (*along, *shared))
        memory = ", ".join(f"Tensor {x}" for x in Terms._fields)
        self.forward = operator(f"{name}({inputs}, {memory}, int kernels) -> Tensor[]")(self._forward)
        backward = f"{name}_backward(Tensor?[] grads, bool[] wanted, {inputs}, {memory}, int kernels) -> Tensor[]"
        self.backward = operator(backward)(self._backward)
        self.forward.register_fake(self._empty)
        self.backward.register_fake(self._empty_gradients)
        self.forward.register_autograd(self._differentiate, setup_context=self._save)

    def __call__(self, memory: Terms, kernels: int, *inputs: Tensor | None) -> tuple[Terms, Terms]:
        """What every token reads, and the memory after the last."""
        v = inputs[self.time - 2]
        if 0 in v.shape[:2]:
            shapes = (x.shape for x in self._empty_results(inputs, memory, kernels)[:3])
            return Terms(*(connected_zeros(v, shape, *inputs, *memory) for shape in shapes)), memory
        with without_autocast(v.device):
            if portable():
                return self.by_steps(memory, *_widened(inputs))
            if kernels and self.whole is not None and not transformed(*inputs, *memory):
                return self.whole(memory, *inputs)
            if v.shape[1] == 1 and not differentiated(*inputs, *memory):  # a kernel takes more launches, and waits
                return self.step(memory, *_widened(inputs))
            if transformed(*inputs, *memory):
                return self.exact(memory, *_widened(inputs))
            if kernels and self.direct and not torch.compiler.is_compiling():
                if (found := self.slab(memory, kernels, *inputs)) is not None:
                    fallbacks.count(inputs[self.time - 1].numel(), 0)
                    return found[:2]
                inputs, kernels = _widened(inputs), 0
        out = self.forward(*inputs, *memory, kernels)
        return Terms(*out[:3]), Terms(*out[3:6])

    def by_steps(self, memory: Terms, *inputs: Tensor | None) -> tuple[Terms, Terms]:
        """The scan, one token after another."""
        shared = inputs[self.time :]

        def token(before: list[Tensor], *tokens: Tensor | None):
            read, after = self.step(Terms(*before), *tokens, *shared)
            return list(after), list(read)

        last, rows = along_time(token, list(memory), *inputs[: self.time])
        return Terms(*rows), Terms(*last)

    def _slabs(self, inputs: Sequence[Tensor | None], kernels: int) -> list[slice]:
        time = inputs[self.time - 1].shape[1]
        size = time if kernels else self.size(*inputs)
        return [slice(start, start + size) for start in range(0, time, size)]

    def _cut(self, inputs: Sequence[Tensor | None], piece: slice) -> list[Tensor | None]:
        return [x if x is None or n >= self.time else x[:, piece] for n, x in enumerate(inputs)]

    def _in_float64(self, inputs: Sequence[Tensor | None]) -> bool:
        """Whether float32 would cost digits."""
        f, beta = inputs[self.time - 1], inputs[-1]
        if f.dtype != torch.float32 or f.device.type == "mps":
            return False
        return needs_float64(f, beta) or self.rough(*inputs)

    def _read(self, memory: Terms, kernels: int, inputs: Sequence[Tensor | None]) -> tuple[Terms, Terms, int]:
        """`slab`, or `exact` where that is in doubt; a call that kernels cannot read is cut into slabs of its own."""
        if (found := self.slab(memory, kernels, *inputs)) is not None:
            return found
        if not kernels:
            return *self.exact(memory, *inputs), inputs[self.time - 1].numel()
        inputs = _widened(inputs)
        dtype, pieces = memory.mean.dtype, self._slabs(inputs, 0)
        if self._in_float64(inputs):
            inputs, memory = _doubled(inputs), Terms(*double(*memory))
        reads, again = [], 0
        for piece in pieces:
            read, memory, more = self._read(memory, 0, self._cut(inputs, piece))
            reads.append(read)
            again += more
        read = Terms(*(torch.cat(parts, 1).to(dtype) for parts in zip(*reads)))
        return read, Terms(*(x.to(dtype) for x in memory)), again

    def _forward(self, *arguments):
        """The reads of all tokens, the memory after the last, and the memory at every border between slabs."""
        inputs, memory, kernels = arguments[: self.count], Terms(*arguments[self.count : -1]), arguments[-1]
        dtype, again, reads, borders = memory.mean.dtype, 0, [], [memory]
        with torch.no_grad(), without_autocast(memory.mean.device):
            if self._at_once(kernels):
                read, after, again = self._read(memory, kernels, inputs)
                fallbacks.count(read.free_energy.numel(), again)
                pairs = zip((*read, *after), self._empty_results(inputs, memory, kernels))
                return [*(x.to(y.dtype).contiguous() for x, y in pairs), *(x.new_empty(0, *x.shape) for x in memory)]
            wide, pieces = not kernels and self._in_float64(inputs), self._slabs(inputs, kernels)
            if wide:
                inputs, memory = _doubled(inputs), Terms(*double(*memory))
            for piece in pieces:
                read, memory, more = self._read(memory, kernels, self._cut(inputs, piece))
                again += more
                reads.append(read)
                borders.append(memory)
        out = [(torch.cat(parts, 1) if len(parts) > 1 else parts[0].contiguous()).to(dtype) for parts in zip(*reads)]
        fallbacks.count(out[2].numel(), again)
        borders = [torch.stack([x.to(dtype) for x in parts]) for parts in zip(*borders)]
        return [*out, *(x[-1].clone() for x in borders), *borders]

    def _at_once(self, kernels: int) -> bool:
        """Whether the call is one slab, whose read is in v's dtype and whose gradients are new tensors."""
        return bool(kernels) and self.direct

    def _empty_results(self, inputs: Sequence[Tensor | None], memory: Terms, kernels: int) -> list[Tensor]:
        """What every token reads, and the memory after the last."""
        v, f = inputs[self.time - 2 : self.time]
        like = v if self._at_once(kernels) else memory.mean
        reads = (memory.mean, memory.log_weight), (like, v), (like, f)
        reads = [one.new_empty(*v.shape[:-1], other.shape[-1]) for one, other in reads]
        return [*reads, *(x.new_empty(x.shape) for x in memory)]

    def _empty(self, *arguments):
        inputs, memory, kernels = arguments[: self.count], Terms(*arguments[self.count : -1]), arguments[-1]
        time, size = inputs[self.time - 1].shape[1], self.size(*inputs)
        count = 0 if self._at_once(kernels) else 2 if kernels else (time + size - 1) // size + 1
        return [*self._empty_results(inputs, memory, kernels), *(x.new_empty(count, *x.shape) for x in memory)]

    def _backward(self, grads, wanted, *arguments):
        """Gradients of the memory and of the inputs: each slab is read again from its border, the last one first."""
        inputs, borders, kernels = arguments[: self.count], Terms(*arguments[self.count : -1]), arguments[-1]
        dtype, d_reads, d_memory = borders.mean.dtype, grads[:3], grads[3:]
        dtypes = [None if x is None else x.dtype for x in inputs]
        if not kernels and self._in_float64(inputs):
            inputs, borders = _doubled(inputs), Terms(*double(*borders))
            d_reads, d_memory = double(*d_reads), double(*d_memory)
        asked = [n for n, (x, w) in enumerate(zip(inputs, wanted)) if x is not None and w]
        at_once = self._at_once(kernels)
        made = lambda n: (torch.empty_like if n < self.time else torch.zeros_like)(  # noqa: E731
            inputs[n], memory_format=torch.contiguous_format
        )
        found = {} if at_once else {n: made(n) for n in asked}
        for number, piece in reversed(list(enumerate(self._slabs(inputs, kernels)))):
            with recorded(), without_autocast(borders.mean.device):
                given = [None if x is None else x.detach() for x in self._cut(inputs, piece)]
                before = [x[number].detach().requires_grad_() for x in borders]
                leaves = [*before, *(given[n].requires_grad_() for n in asked)]
                read, memory, _ = self._read(Terms(*before), kernels, given)
                pairs = [*zip(read, (None if d is None else d[:, piece] for d in d_reads)), *zip(memory, d_memory)]
                pairs = [(y, d.to(y.dtype)) for y, d in pairs if d is not None and y.requires_grad]
                outputs, cotangents = zip(*pairs)
                gradients = torch.autograd.grad(outputs, leaves, cotangents, materialize_grads=True)
            d_memory = gradients[:3]
            for n, part in zip(asked, gradients[3:]):
                if at_once:
                    found[n] = part.contiguous()
                elif n < self.time:
                    found[n][:, piece] = part
                else:
                    found[n] += part
        return [*(x.to(dtype).clone() for x in d_memory), *(found[n].to(dtypes[n]) for n in asked)]

    def _empty_gradients(self, grads, wanted, *arguments):
        asked = [x for x, w in zip(arguments[: self.count], wanted) if x is not None and w]
        borders = arguments[self.count : -1]
        return [*(x.new_empty(x.shape[1:]) for x in borders), *(x.new_empty(x.shape) for x in asked)]

    def _save(self, ctx, inputs, output):
        *tensors, ctx.kernels = inputs
        ctx.save_for_backward(*tensors, *output[6:])
        ctx.set_materialize_grads(False)

    def _differentiate(self, ctx, grads):
        saved = ctx.saved_tensors  # read once: checkpointing hands it out but once
        inputs, memory, borders = saved[: self.count], saved[self.count : -3], saved[-3:]
        borders = [x.unsqueeze(0) for x in memory] if self._at_once(ctx.kernels) else borders
        if torch.is_grad_enabled():
            return *again_differentiable(self.again, [*inputs, *memory], grads[:6]), None
        wanted = list(ctx.needs_input_grad[: self.count])
        found = self.backward(list(grads[:6]), wanted, *inputs, *borders, ctx.kernels)
        remaining = iter(found[3:])
        d_inputs = [next(remaining) if x is not None and w else None for x, w in zip(inputs, wanted)]
        return *d_inputs, *found[:3], None

    def again(self, *tensors):
        """The exact results in float64, whose second derivatives need digits that float32 has not."""
        tensors = _doubled(tensors)
        read, memory = self.exact(Terms(*tensors[self.count :]), *tensors[: self.count])
        return [*read, *memory]


def _widened(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [upcast(x) if x is not None and x.is_floating_point() else x for x in tensors]


def _doubled(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [x.double() if x is not None and x.is_floating_point() else x for x in tensors]
