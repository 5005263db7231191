"""Functions that kernels compute and differentiate: an autograd function in eager calls, two operators in graphs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fem.ops.common.backend import keeps_graphs, on
from fem.ops.common.operator import operator, refuse_second_derivatives

Tensors = Sequence[Tensor | None]


class OwnBackward(ABC):
    """A function of tensors and settings with a backward of its own.

    Eager calls take an autograd function, which costs the host less than an operator. Compiled graphs have the
    operators fem::name and fem::name_backward, which torch.compile does not look into.

    tensors, settings: the arguments' schemas, such as "Tensor x, Tensor? bias" and "int[] form, float eps"; a tuple of
    whole numbers may be given for an int[]. fixed: the tensors without a gradient. count: how many of the results are
    returned; kept: from which on they are kept for the backward. graphed: as `operator` takes it.
    """

    name: str
    tensors: str
    settings: str
    fixed: Sequence[str] = ()
    count = 1
    kept = 0
    graphed = True

    def __init__(self):
        names = [one.split()[1] for one in self.tensors.split(", ")]
        self.learnt = [name not in self.fixed for name in names]
        settings = f", {self.settings}" if self.settings else ""
        backward = f"{self.name}_backward(Tensor?[] grads, Tensor?[] tensors, Tensor[] kept{settings}) -> Tensor[]"
        self._forward = operator(f"{self.name}({self.tensors}{settings}) -> Tensor[]", self.graphed)(self._run)
        self._backward = operator(backward, self.graphed)(self._run_backward)
        self._forward.register_fake(lambda *arguments: self.empty_results(*self._parted(arguments)))
        self._backward.register_fake(
            lambda grads, tensors, *_: [x.new_empty(x.shape) for x, wanted in self._wanted(tensors) if wanted]
        )
        self._forward.register_autograd(self._differentiate, setup_context=self._save)

    @abstractmethod
    def forward(self, differentiated: bool, tensors: Tensors, *settings) -> list[Tensor]:
        """The results. differentiated: whether they may keep what a backward will need."""

    @abstractmethod
    def empty_results(self, tensors: Tensors, *settings) -> list[Tensor]:
        """Tensors of the results' shapes and dtypes."""

    @abstractmethod
    def backward(self, grads: Tensors, tensors: Tensors, kept: Sequence[Tensor], *settings) -> list[Tensor]:
        """New tensors: the gradients of those learnt tensors that there are, in their order."""

    def again(self, grads: Tensors, tensors: Tensors, *settings) -> Tensors:
        """The gradients of the first tensors, all that are learnt, where they are to be differentiated again."""
        refuse_second_derivatives()

    def __call__(self, tensors: Tensors, *settings) -> Sequence[Tensor]:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():  # where autograd would ask for a graph
            return self.results(tensors, *settings)[: self.count]
        return _Eager.apply(self, settings, *tensors)

    def results(self, tensors: Tensors, *settings) -> list[Tensor]:
        """All results; only a compiled graph can differentiate them."""
        if not torch.compiler.is_compiling():
            with on(tensors[0].device):
                return self.forward(False, tensors, *settings)
        return self._forward(*tensors, *(list(map(int, one)) if isinstance(one, tuple) else one for one in settings))

    def _parted(self, arguments: Sequence) -> tuple:
        count = len(self.learnt)
        return arguments[:count], *arguments[count:]

    def _wanted(self, tensors: Tensors) -> list[tuple[Tensor | None, bool]]:
        """The tensors, and whether each has a gradient."""
        return [(x, learnt and x is not None) for x, learnt in zip(tensors, self.learnt)]

    def _run(self, *arguments) -> list[Tensor]:
        with on(arguments[0].device):
            return self.forward(keeps_graphs(arguments[0].device), *self._parted(arguments))

    def _run_backward(self, grads: Tensors, tensors: Tensors, kept: Sequence[Tensor], *settings) -> list[Tensor]:
        with on(tensors[0].device):
            return self.backward(grads, tensors, kept, *settings)

    def _save(self, ctx, inputs, output) -> None:
        tensors, *ctx.settings = self._parted(inputs)
        ctx.save_for_backward(*tensors, *output[self.kept :])
        ctx.set_materialize_grads(False)

    def _differentiate(self, ctx, grads) -> tuple[Tensor | None, ...]:
        return *self.gradients(self._backward, ctx, grads[: self.count]), *[None] * len(ctx.settings)

    def gradients(self, backward: Callable[..., list[Tensor]], ctx, grads: Tensors) -> Tensors:
        """Those of all tensors, by one of the two backwards."""
        saved = ctx.saved_tensors  # read once: checkpointing hands it out but once
        tensors, *kept = self._parted(saved)
        if torch.is_grad_enabled():
            found = self.again(grads, tensors, *ctx.settings)
            return [*found, *[None] * (len(tensors) - len(found))]
        found = iter(backward(list(grads), list(tensors), kept, *ctx.settings))
        return [next(found) if wanted else None for _, wanted in self._wanted(tensors)]


class _Eager(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function: OwnBackward, settings, *tensors):
        with on(tensors[0].device):
            results = function.forward(any(ctx.needs_input_grad), tensors, *settings)
        function._save(ctx, (*tensors, *settings), results)
        ctx.function = function
        return tuple(results[: function.count])

    @staticmethod
    def backward(ctx, *grads):
        return None, None, *ctx.function.gradients(ctx.function._run_backward, ctx, grads)
