"""A read by the kernel that somebody else wrote for its prior: what goes in, what comes out, and the proof.

    sums = kernel([v | e | 1])        e = exp(beta (f - c))        Z = sums_1
    mean = sums_v / Z        F = c + log(sums_e / Z) / beta

c is the largest f of a channel, so e is at most 1, and what a kernel flushes to 0 is below e^-87 of the other factors.
Sums above e^-60 of their scale have lost less than their rounding (`LEAST_PROVEN`); what is below is computed again.
Where beta f spans less than 1/2, e - 1 and log1p stand for e and log, so that a small beta costs F no digit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from fem.ops.common.precision import LEAST_PROVEN
from fem.ops.common.read import LOG_ZERO, Terms
from fem.ops.common.steps import portable
from fem.ops.common.transforms import transformed

LEAST = LEAST_PROVEN[torch.float32]
NEAR = 0.5  # nats: up to here log1p keeps digits that a logarithm near 1 loses
_AUTOGRAD = [torch._C.DispatchKey.AutogradCPU, torch._C.DispatchKey.AutogradCUDA]
_AUTOGRAD += [torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.ADInplaceOrView]


def fused(causal: bool, state: dict | None, return_state: bool, *tensors: Tensor | None) -> bool:
    """Whether a scan is read by a kernel: a causal one of whole sequences, of at least two tokens.

    Both directions, states and what PyTorch transforms or exports are the plain form's.
    """
    shape = next(x.shape for x in tensors if x is not None)
    return (
        causal
        and state is None
        and not return_state
        and not (shape[0] == 0 or shape[1] < 2 or portable() or transformed(*tensors))
    )


class Shift(NamedTuple):
    """Of every channel, (B, 1, ...): the middle of v, c of the free values, and whether e - 1 stands for e."""

    middle: Tensor
    c: Tensor | None = None
    near: Tensor | None = None


def pack(v: Tensor, free: Tensor, beta: Tensor | None) -> tuple[Tensor, Tensor | None, Shift]:
    """v - middle and e in float32, and the shifts: differences of values keep digits that 1000 + v has not."""
    v = v.float()
    middle = v.detach().mean(1, keepdim=True)
    if beta is None:
        return v - middle, None, Shift(middle)
    free = free.float()
    low, high = free.detach().amin(1, keepdim=True), free.detach().amax(1, keepdim=True)
    near = beta.detach() * (high - low) < NEAR
    z = beta * (free - high)
    return v - middle, torch.where(near, z.expm1(), z.exp()), Shift(middle, high, near)


def unpack(
    weight: Tensor, of_v: Tensor, of_e: Tensor | None, shift: Shift, beta: Tensor | None, least: Tensor | float
) -> tuple[Terms, Tensor, Tensor | None]:
    """The read from its sums, the rows in doubt and the free energies in doubt.

    least: what a weight has to be to be proven, and a sum of energies where the kernel has added weights below 1.
    """
    rows = ~((weight > 0) & (weight >= least) & (weight < torch.inf))
    weight = torch.where(rows, 1, weight)
    log_weight = torch.where(rows, LOG_ZERO, weight.log())
    mean = torch.where(rows, 0, shift.middle + of_v / weight)
    if beta is None:
        return Terms(log_weight, mean, None), rows, None
    ratio = of_e / weight
    entries = rows | ~(shift.near | ((of_e >= least) & (ratio >= LEAST)))
    ratio = torch.where(entries, torch.where(shift.near, 0, 1), ratio)
    gain = torch.where(shift.near, torch.where(shift.near, ratio, 0).log1p(), torch.where(shift.near, 1, ratio).log())
    return Terms(log_weight, mean, torch.where(entries, 0, shift.c + gain / beta)), rows, entries


def proven(
    terms: Terms, rows: Tensor, entries: Tensor | None, alive: Tensor, plain: Callable[[], Terms]
) -> list[Tensor]:
    """The terms, and by `plain` what is in doubt. alive: rows that may have weight. Waits once for the device."""
    rows = rows & alive
    entries = rows if entries is None else entries & alive
    if bool(rows.any() | entries.any()):
        exact = plain()
        doubts = (rows, rows, entries)
        terms = Terms(*(None if x is None else torch.where(d, y, x) for d, x, y in zip(doubts, terms, exact)))
    return [x for x in terms if x is not None]


@contextmanager
def _recorded() -> Iterator[None]:
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


def opaque(name: str, inputs: str, function: Callable[..., Sequence[Tensor]], empty: Callable) -> Callable:
    """`function` of tensors as one operator that torch.compile does not look into, with its gradient.

    The kernels of others break a graph where they are called, and run by autograd functions of their own. The operator
    keeps its inputs; its backward runs the function again and differentiates that. empty: the outputs without values.
    """
    count = inputs.count("Tensor")

    @torch.library.custom_op(f"fem::{name}", mutates_args=(), schema=f"({inputs}) -> Tensor[]")
    def forward(*tensors):
        with torch.no_grad():
            return [x.contiguous() for x in function(*tensors)]

    @torch.library.custom_op(
        f"fem::{name}_backward", mutates_args=(), schema=f"(Tensor[] grads, bool[] wanted, {inputs}) -> Tensor[]"
    )
    def backward(grads, wanted, *tensors):
        with _recorded():
            leaves = [x if x is None else x.detach().requires_grad_(w) for x, w in zip(tensors, wanted)]
            outputs = function(*leaves)
            asked = [x for x, w in zip(leaves, wanted) if w]
            pairs = [(y, grad) for y, grad in zip(outputs, grads) if y.requires_grad]
            outputs, grads = zip(*pairs)
            found = torch.autograd.grad(outputs, asked, grads, allow_unused=True)
        return [torch.zeros_like(x) if d is None else d.contiguous() for x, d in zip(asked, found)]

    def save(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    def differentiate(ctx, grads):
        tensors, wanted = ctx.saved_tensors, list(ctx.needs_input_grad[:count])
        found = iter(backward(grads, wanted, *tensors))
        return tuple(next(found) if w else None for w in wanted)

    forward.register_fake(empty)
    backward.register_fake(lambda grads, wanted, *tensors: [x.new_empty(x.shape) for x, w in zip(tensors, wanted) if w])
    forward.register_autograd(differentiate, setup_context=save)
    return forward
