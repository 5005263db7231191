"""How the operators of the library are declared to PyTorch.

Private part of PyTorch: `_inductor.config`, which is read and never written, of 2.11 to 2.13. It may go when inductor
keeps the pieces of a concatenation that lie in another part of a graph than the rest.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor


def operator(schema: str, waits: bool = True) -> Callable[[Callable], torch.library.CustomOpDef]:
    """Declares a function that changes no argument as `fem::name`, of a schema like "name(Tensor x) -> Tensor".

    waits: it reads a value on the host, which a CUDA graph must not do.
    """
    name, bracket, rest = schema.partition("(")
    tags = (torch.Tag.cudagraph_unsafe,) if waits else ()

    def declare(function: Callable) -> torch.library.CustomOpDef:
        declared = torch.library.custom_op(f"fem::{name}", function, mutates_args=(), schema=bracket + rest, tags=tags)
        if waits:
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
                    f"fem::{name} waits for a value, and of graphs that are cut around it inductor loses data; instead "
                    'of mode="reduce-overhead" pass options={"triton.cudagraphs": True, "graph_partition": False}.'
                )
        return shapes(*inputs)

    return traced
