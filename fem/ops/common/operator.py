"""How the operators of the library are declared to PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils.flop_counter import register_flop_formula


def operator(
    schema: str, flops: Callable | None = None, waits: bool = True
) -> Callable[[Callable], torch.library.CustomOpDef]:
    """Declares a function that changes no argument as `fem::name`, of a schema like "name(Tensor x) -> Tensor".

    flops: the formula by which FlopCounterMode counts a call. waits: it reads a value on the host, which a CUDA graph
    must not do, so inductor leaves the call out of its graphs.
    """
    name, bracket, rest = schema.partition("(")

    tags = (torch.Tag.cudagraph_unsafe,) if waits else ()

    def declare(function: Callable) -> torch.library.CustomOpDef:
        declared = torch.library.custom_op(f"fem::{name}", function, mutates_args=(), schema=bracket + rest, tags=tags)
        if flops is not None:
            register_flop_formula(getattr(torch.ops.fem, name))(flops)
        return declared

    return declare
