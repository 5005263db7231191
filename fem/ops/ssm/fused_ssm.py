"""The scan of a state space model by its kernels: what they are launched with, and their operator.

Forward, few rows are cut into pieces of some chunks, as those of `channel_kernels` are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fem.ops.common.backend import differentiated
from fem.ops.common.joined import by_tokens
from fem.ops.common.launch import cdiv, next_power_of_2
from fem.ops.common.merge_kernels import pieces_of
from fem.ops.common.operator import again_differentiable
from fem.ops.common.own_backward import OwnBackward
from fem.ops.common.precision import double
from fem.ops.common.read import Terms
from fem.ops.common.scan import memory_before
from fem.ops.ssm.ssm_kernels import ssm_backward_kernel, ssm_kernel
from fem.ops.ssm.ssm_log_space import SsmInputs, ssm_by_prefixes

CHUNK = 128  # tokens between cells that are kept
CELLS = 128  # of a warp
WARPS = 1024  # enough for a card: a warp waits less for its own results than one of `channel_kernels`, of one cell each
LEAST_BLOCK = 8  # channels of a program: b and c have a gradient for each


def states_by_kernels(memory: Terms | None, x: SsmInputs) -> tuple[Terms, Terms]:
    """What every token reads, (B, T, W), and the memory after the last, (B, N, W), in float32; None: of no token."""
    cells = [None] * 3 if memory is None else [part.mT.contiguous() for part in memory]
    inputs = *x._replace(a=x.a.T.contiguous()), *cells
    out = _SSM_READ(inputs, CHUNK if differentiated(*inputs) else 0)
    return Terms(*out[:3]), Terms(*(part.mT for part in out[3:]))


def cell_sizes(rank: int) -> dict[str, int]:
    """What the kernels are built for, by the number of states."""
    states = next_power_of_2(rank)
    block = max(LEAST_BLOCK, CELLS // states)
    return {"N": rank, "STATES": states, "BLOCK": block, "num_warps": block * states // CELLS}


def _launch(x: SsmInputs) -> tuple[int, dict]:
    """The blocks of channels, and the sizes and flags of either kernel."""
    (_, time, width), sizes = x.delta.shape, cell_sizes(x.a.shape[1])
    flags = {"HAS_V": x.v.shape[2] > 0, "HAS_F": x.f.shape[2] > 0}
    return cdiv(width, sizes["BLOCK"]), {"T": time, "W": width} | sizes | flags


def _given(inputs: Sequence[Tensor | None]) -> tuple[list[Tensor | None], dict[str, int]]:
    """The inputs as kernels read them, and numbers from one token of v and of f to the next."""
    x = SsmInputs(*inputs[:-3])
    (v, v_row), (f, f_row) = by_tokens(x.v), by_tokens(x.f)
    x = x._replace(v=None, f=None)
    others = [None if part is None else part.contiguous() for part in (*x, *inputs[-3:])]
    return [*SsmInputs(*others[:-3])._replace(v=v, f=f), *others[-3:]], {"v_row": v_row, "f_row": f_row}


class _SsmRead(OwnBackward):
    """The results: what is read, the cells after the last token, and those before every chunk.

    chunk: of how many tokens; 0: no cells are kept. A graph has it, which may be stored and outlive this version.
    """

    name, fixed, count, settings = "ssm_read", ("opens",), 6, "int chunk"
    tensors = ", ".join(
        [f"Tensor{'?' * (name == 'opens')} {name}" for name in SsmInputs._fields]
        + [f"Tensor? memory_{name}" for name in Terms._fields]
    )

    def forward(self, differentiated, tensors, chunk):
        x, out = SsmInputs(*tensors[:-3]), self.empty_results(tensors, chunk)
        (blocks, sizes), (given, rows), batch = _launch(x), _given(tensors), len(x.delta)
        most = WARPS // (batch * blocks * sizes["num_warps"])
        pieces, length = pieces_of(x.delta.shape[1], most, chunk or CHUNK, chunk or CHUNK)
        ends = x.delta.new_empty(batch, pieces, 5, *x.a.shape)
        for of_ends in (True, False)[pieces == 1 :]:
            ssm_kernel[blocks * batch * pieces,](
                *given, *out, ends, **sizes, **rows, pieces=pieces, length=length, CHUNK=chunk or CHUNK, KEPT=chunk > 0,
                ENDS=of_ends,
            )  # fmt: skip
        return out

    def empty_results(self, tensors, chunk):
        x = SsmInputs(*tensors[:-3])
        parts, (batch, time), rank = (x.delta, x.v, x.f), x.delta.shape[:2], x.a.shape[1]
        read = [x.delta.new_empty(part.shape) for part in parts]  # v and f may have 16 bits
        after, borders = (
            [x.delta.new_empty(batch, *count, part.shape[2], rank) for part in parts]
            for count in ((), (cdiv(time, chunk) if chunk else 0,))
        )
        return [*read, *after, *borders]

    def backward(self, grads, tensors, kept, chunk):
        x, memory, read, borders = SsmInputs(*tensors[:-3]), tensors[-3:], kept[:3], kept[6:]
        stated = any(d is not None for d in grads[3:])
        used = False, True, True, stated, stated, stated  # by the kernel, whether there is a gradient or not
        grads = [torch.zeros_like(y) if d is None and use else d for d, y, use in zip(grads, kept, used)]
        (blocks, sizes), (batch, time), new = _launch(x), x.delta.shape[:2], x.delta.new_empty
        old = [new(batch, chunk, *part.shape[2:]) for part in borders]
        parts = [new(blocks, *part.shape) for part in (x.log_b, x.log_c)]
        shared = [new(batch, *part.shape) for part in (x.a, x.skip, x.beta)]
        given, rows = _given(tensors)
        delta, log_delta, v, f = (
            torch.empty_like(part, memory_format=torch.contiguous_format) for part in (x.delta, x.log_delta, x.v, x.f)
        )
        before = [None if part is None else new(part.shape) for part in memory]
        ssm_backward_kernel[blocks * batch,](
            *given[:10], *read, *borders, *old, *(d if d is None else d.contiguous() for d in grads), delta,
            log_delta, *parts, v, f, *shared, *before, TOKENS=batch * time, **sizes, **rows, CHUNK=chunk,
        )  # fmt: skip
        found = delta, log_delta, *(part.sum(0) for part in parts), v, f, *(part.sum(0) for part in shared)
        return [*found, *(part for part in before if part is not None)]

    def again(self, grads, tensors, chunk):
        return again_differentiable(_by_definition, tensors, grads)


def _by_definition(*inputs):
    """In float64, whose digits second derivatives need."""
    x = SsmInputs(*double(*(None if n == 4 else x for n, x in enumerate(inputs[:-3]))))
    x, widths = x._replace(opens=inputs[4], a=x.a.T), (part.shape[2] for part in (x.delta, x.v, x.f))
    if inputs[-3] is None:
        memory = memory_before(None, x.beta, *((len(x.v), len(x.a), width) for width in widths))
    else:
        memory = Terms(*(part.mT for part in double(*inputs[-3:])))
    read, after = ssm_by_prefixes(memory, x)
    return [*read, *(part.mT for part in after)]


_SSM_READ = _SsmRead()
