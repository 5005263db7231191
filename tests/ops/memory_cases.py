"""Faults that results do not show in Triton's interpreter, and `sanitizer` does: `test_kernels.py` runs this file."""

import interpreted  # noqa: F401  (before any kernel)

# isort: split

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

COUNT, BLOCK = 16, 8
ITEM = torch.arange(COUNT)
FAULTS = {  # where y is written, which of x is read for it, and what is wrong
    "behind the end": (ITEM + 1, ITEM, "leaves its tensors"),
    "before the start": (ITEM, ITEM - 1, "leaves its tensors"),
    "both write": (ITEM % BLOCK, ITEM, "writes what another program writes"),
    "two threads write": (ITEM // 2, ITEM, "writes one number twice at once"),
}
IN_PLACE = {
    "the other has written": (COUNT - 1 - ITEM, ITEM, "reads what another program writes"),
    "the other has read": (ITEM, COUNT - 1 - ITEM % BLOCK, "writes what another program reads"),
}


@triton.jit
def move_kernel(x, y, to, source, BACK: tl.constexpr, BARRIER: tl.constexpr, BLOCK: tl.constexpr):
    """y[to] = x[source], and where BACK x = y."""
    item = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + tl.load(to + item), tl.load(x + tl.load(source + item)))
    if BARRIER:
        tl.debug_barrier()
    if BACK:
        tl.store(x + item, tl.load(y + item))


def move(x, y, to=ITEM, source=ITEM, back=False, barrier=False):
    move_kernel[COUNT // BLOCK,](x, y, to, source, BACK=back, BARRIER=barrier, BLOCK=BLOCK)


@pytest.mark.parametrize("case", [*FAULTS, *IN_PLACE])
def test_a_launch_raises_at(case):
    to, source, fault = (FAULTS | IN_PLACE)[case]
    x = torch.randn(COUNT)
    with pytest.raises(InterpreterError, match=fault):
        move(x, x if case in IN_PLACE else torch.randn(COUNT), to, source)


def test_a_program_reads_its_own_writes_behind_a_barrier():
    x, y = torch.randn(2, COUNT)
    with pytest.raises(InterpreterError, match="reads what it has just written"):
        move(x, y, back=True)
    move(x, y, back=True, barrier=True)


def test_what_the_library_does_is_no_fault():
    x, y = torch.randn(COUNT), torch.randn(COUNT)
    move(x, x)  # in place
    move(torch.ones(COUNT), y, ITEM % BLOCK)  # a flag that several raise
    assert y[:BLOCK].eq(1).all()
