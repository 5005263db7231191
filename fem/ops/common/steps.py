"""A recurrence step by step: in a loop, which PyTorch can transform in any way, or by the scan of `torch.export`.

Private parts of PyTorch: `compiler._is_exporting_flag`, of 2.11, which may go when that is no longer supported, and
`_higher_order_ops.scan`, of 2.11 to 2.13, when it is public.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Step = Callable[..., tuple[Sequence[Tensor], Sequence[Tensor]]]


def exporting() -> bool:
    """Whether `torch.export` is tracing. In PyTorch 2.11 `is_exporting` is true under torch.compile, too."""
    return torch.compiler.is_exporting() and getattr(torch.compiler, "_is_exporting_flag", True)


def portable() -> bool:
    """Whether `torch.export` is tracing a graph that must not contain our custom operators.

    That is every graph for inference, under torch.no_grad(), and for ONNX. A graph exported with gradients keeps the
    operators, as they have gradients.
    """
    return exporting() and (not torch.is_grad_enabled() or torch.onnx.is_in_onnx_export())


def running_maximum(x: Tensor) -> Tensor:
    """max_{i <= t} x_ti along the last axis. A `portable` graph compares all pairs, as ONNX has no such operator."""
    if not portable():
        return x.cummax(-1).values
    time = torch.arange(x.shape[-1], device=x.device)
    return torch.where(time[:, None] >= time, x[..., None, :], torch.iinfo(x.dtype).min).amax(-1)


def along_time(step: Step, state: Sequence[Tensor], *inputs: Tensor | None) -> tuple[list[Tensor], list[Tensor]]:
    """state, rows = step(state, *tokens) for every token: the state after the last, and the rows, (B, T, ...).

    inputs (B, T, ...), of which a step gets (B, 1, ...), as it returns rows; None stays None. A `portable` graph holds
    one step, under torch's scan, and takes any T.
    """
    if portable():
        return _exported(step, state, *inputs)
    rows, given = [], [x is not None for x in inputs]
    for tokens in zip(*(x.split(1, 1) for x in inputs if x is not None)):
        state, row = step(state, *_with_none(tokens, given))
        rows.append(row)
    return list(state), [torch.cat(parts, 1) for parts in zip(*rows)]


def _with_none(tokens: Sequence[Tensor], given: Sequence[bool]) -> list[Tensor | None]:
    tokens = iter(tokens)
    return [next(tokens) if is_given else None for is_given in given]


def _exported(step: Step, state: Sequence[Tensor], *inputs: Tensor | None) -> tuple[list[Tensor], list[Tensor]]:
    from torch._higher_order_ops.scan import scan

    copies = lambda parts: [x.clone(memory_format=torch.contiguous_format) for x in parts]  # noqa: E731  (no views)
    given = [x is not None for x in inputs]  # not the inputs themselves, of which the compiler would keep guards
    one = lambda tokens: _with_none([x.unsqueeze(1) for x in tokens], given)  # noqa: E731
    body = lambda state, tokens: tuple(map(copies, step(state, *one(tokens))))  # noqa: E731
    sequences = [x.movedim(1, 0) for x in inputs if x is not None]
    with torch.no_grad() if torch.is_grad_enabled() else contextlib.nullcontext():  # slow to differentiate
        last, rows = scan(body, copies(state), sequences, dim=0)
    return list(last), [x.movedim(0, 1).flatten(1, 2) for x in rows]
