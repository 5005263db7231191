"""What a card has and Triton's interpreter has not: `sanitizer` finds what no result shows, `card_arithmetic` errs.
`test_kernels.py` runs this file."""

import interpreted  # noqa: F401  (before any kernel)

# isort: split

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from fem.ops.common.triton_math import dot, exponential, logarithm, quotient

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


@triton.jit
def functions_kernel(x, y, BLOCK: tl.constexpr):
    """x / x, e^-x, log x, and x x - (x x) by a product that is rounded and one that is not."""
    item = tl.arange(0, BLOCK)
    a = tl.load(x + item)
    tl.store(y + item, quotient(a, a))
    tl.store(y + BLOCK + item, exponential(-a))
    tl.store(y + 2 * BLOCK + item, logarithm(a))
    square = a * a
    tl.store(y + 3 * BLOCK + item, a * a - tl.where(item >= 0, square, 0.0))


def test_functions_err_as_on_a_card_and_a_product_and_a_sum_round_once():
    x = torch.cat([torch.tensor([1.0, 120.0]), torch.rand(254).clamp_min(1e-3)])
    y = torch.empty(4, 256)
    functions_kernel[1,](x, y, BLOCK=256)
    exact = torch.stack([x / x, (-x.double()).exp(), x.double().log(), x.double() ** 2 - x * x])
    errors = (y.double() - exact).abs()
    for error, size in zip(errors[:3], (torch.ones(()), exact[1], exact[2].abs().clamp_min(1.0))):
        assert 0 < (error / size)[2:].max() < 2.0**-21
    assert y[:3, 0].tolist() == [1.0, pytest.approx(0.36787944), 0.0]
    assert y[1, 1] == 0  # below 2^-126
    assert y[3].any()
    assert errors[3].max() < 1e-14


@triton.jit
def product_kernel(x, y, PRECISION: tl.constexpr, SIZE: tl.constexpr):
    item = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None]
    a = tl.load(x + item)
    tl.store(y + item, dot(a, a, tl.zeros((SIZE, SIZE), tl.float32), PRECISION))


@pytest.mark.parametrize("precision, least, most", [("ieee", 0.0, 1e-6), ("tf32x3", 0.0, 2e-6), ("tf32", 1e-4, 2e-3)])
def test_products_have_the_precision_that_they_are_asked_for(precision, least, most):
    x, y = torch.randn(16, 16), torch.empty(16, 16)
    product_kernel[1,](x, y, PRECISION=precision, SIZE=16)
    exact = x.double() @ x.double()
    assert least < (y - exact).norm() / exact.norm() < most
