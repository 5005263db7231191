"""A recurrence step by step: in a loop, which PyTorch can transform in any way, or by the scan of `torch.export`.

Private part of PyTorch: `_higher_order_ops.scan`, of 2.11 to 2.15. It may go when that is public.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fem.ops.common.backend import portable

Step = Callable[..., tuple[Sequence[Tensor], Sequence[Tensor]]]


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
