"""How the operators of the library are declared to PyTorch."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch


def operator(schema: str, waits: bool = True) -> Callable[[Callable], torch.library.CustomOpDef]:
    """Declares a function that changes no argument as `fem::name`, of a schema like "name(Tensor x) -> Tensor".

    waits: it reads a value on the host, which a CUDA graph must not do, so inductor makes none of what is compiled
    together with it.
    """
    name, bracket, rest = schema.partition("(")

    tags = (torch.Tag.cudagraph_unsafe,) if waits else ()

    def declare(function: Callable) -> torch.library.CustomOpDef:
        declared = torch.library.custom_op(f"fem::{name}", function, mutates_args=(), schema=bracket + rest, tags=tags)
        if waits:
            register = declared.register_fake
            declared.register_fake = lambda shapes: register(_in_whole_graphs(shapes))
        return declared

    return declare


def _in_whole_graphs(shapes: Callable) -> Callable:
    """`shapes`, which runs while a graph is traced, before it is compiled: without CUDA graphs of its parts.

    With them inductor (PyTorch 2.11 and 2.13) leaves out, without an error, those pieces of a concatenation that are
    computed before the operator: of [x, h] with a conditioner, of [mean, F] with split values.
    """

    def traced(*inputs):
        if "torch._inductor.config" in sys.modules:
            torch._inductor.config.graph_partition = False
        return shapes(*inputs)

    return traced
