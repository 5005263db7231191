"""Operators of the library: how they are declared to PyTorch, and how gradients are taken inside of them and twice.

Private parts of PyTorch, of 2.11 to 2.15: `_inductor.config`, which is read and never written, and which may go when
inductor keeps the pieces of a concatenation that lie in another part of a graph than the rest;
`_C._dispatch_tls_is_dispatch_key_excluded` and its setter, which may go when an operator of `torch.library` may
differentiate what it computes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from zlib import crc32

import torch
from torch import Tensor

_AUTOGRAD = [torch._C.DispatchKey.AutogradCPU, torch._C.DispatchKey.AutogradCUDA]
_AUTOGRAD += [torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.ADInplaceOrView]


def operator(schema: str, graphed: bool = False) -> Callable[[Callable], torch.library.CustomOpDef]:
    """Declares a function that changes no argument as `fem::name`, of a schema like "name(Tensor x) -> Tensor".

    graphed: a CUDA graph of `mode="reduce-overhead"` may hold it. It reads no value on the host, and of its memory it
    keeps its results alone. A checksum of the schema ends the name: graphs that inductor has stored call operators by
    their names, and another version's would be called with other arguments.
    """
    name, bracket, rest = schema.partition("(")
    full = f"fem::{name}_{crc32(schema.encode()):08x}"
    tags = () if graphed else (torch.Tag.cudagraph_unsafe,)

    def declare(function: Callable) -> torch.library.CustomOpDef:
        declared = torch.library.custom_op(full, function, mutates_args=(), schema=bracket + rest, tags=tags)
        if not graphed:
            register = declared.register_fake
            declared.register_fake = lambda shapes: register(_refused_in_parts(name, shapes))
        return declared

    return declare


def _refused_in_parts(name: str, shapes: Callable) -> Callable:
    """`shapes`, which runs while a graph is traced: RuntimeError where CUDA graphs are to be made of its parts.

    Inductor then leaves out, without an error, those pieces of a concatenation that are computed before the operator:
    of [x, h] with a conditioner, of [mean, F] with split values.
    """

    def traced(*inputs):
        if "torch._inductor.config" in sys.modules and any(isinstance(x, Tensor) and x.is_cuda for x in inputs):
            config = torch._inductor.config
            if config.triton.cudagraphs and config.graph_partition:
                raise RuntimeError(
                    f"fem::{name} is in no CUDA graph, and inductor loses data where it cuts around it; instead "
                    'of mode="reduce-overhead" pass options={"triton.cudagraphs": True, "graph_partition": False}.'
                )
        return shapes(*inputs)

    return traced


@contextmanager
def recorded() -> Iterator[None]:
    """Inside a custom op, where autograd is left out: record gradients all the same."""
    before = [torch._C._dispatch_tls_is_dispatch_key_excluded(key) for key in _AUTOGRAD]
    for key in _AUTOGRAD:
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
    try:
        with torch.enable_grad():
            yield
    finally:
        for key, excluded in zip(_AUTOGRAD, before):
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, excluded)


def refuse_second_derivatives() -> None:
    """RuntimeError in the backward of a fused layer under create_graph=True."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "a fused layer is differentiable once, got create_graph=True; a layer whose configuration has "
            'backend="plain" is differentiable any number of times.'
        )


def again_differentiable(
    function: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor | None], grads: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Gradients of a differentiable function's inputs that can themselves be differentiated again.

    The function is differentiated with respect to views: inputs may be computed from each other, and the gradient of
    one must not contain that of another, which the caller's graph adds itself.
    """
    inputs = [None if x is None else x.view_as(x) for x in inputs]
    asked = [x for x in inputs if x is not None and x.requires_grad]
    pairs = [(y, grad) for y, grad in zip(function(*inputs), grads) if grad is not None and y.requires_grad]
    if not pairs:
        return [None] * len(inputs)
    outputs, grads = zip(*pairs)
    gradients = iter(torch.autograd.grad(outputs, asked, grads, create_graph=True, allow_unused=True))
    return [next(gradients) if x is not None and x.requires_grad else None for x in inputs]
