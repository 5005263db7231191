"""A read by the kernel that somebody else wrote for its prior: what goes in, what comes out, and the proof.

    sums = kernel([v | e | 1])        e as in `packing`        Z = sums_1
    mean = sums_v / Z        F = c + log(sums_e / Z) / beta

e is at most 1, and what a kernel flushes to 0 is below e^-87 of the other factors. Sums above e^-60 of their scale have
lost less than their rounding (`LEAST_PROVEN`); what is below is computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fem.ops.common.operator import operator
from fem.ops.common.packing import SMALL_SPAN, Packing
from fem.ops.common.precision import LEAST_PROVEN
from fem.ops.common.read import LOG_ZERO, Terms
from fem.ops.common.scan import ScanCall
from fem.ops.common.slabs import recorded
from fem.ops.common.steps import portable
from fem.ops.common.transforms import transformed

LEAST = LEAST_PROVEN[torch.float32]


def fused(call: ScanCall, *tensors: Tensor | None) -> bool:
    """Whether a scan is read by a kernel: a causal one of whole sequences, of at least two tokens.

    Both directions, states and what PyTorch transforms or exports are the plain form's.
    """
    shape = next(x.shape for x in tensors if x is not None)
    return (
        call.causal
        and call.initial_state is None
        and not call.return_state
        and not (shape[0] == 0 or shape[1] < 2 or portable() or transformed(*tensors))
    )


def pack(v: Tensor, free: Tensor, beta: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor, Packing | None]:
    """v - middle and e in float32, the middle of v in every channel, (B, 1, ...), and how e was packed: differences of
    values keep digits that 1000 + v has not."""
    v = v.float()
    middle = v.detach().mean(1, keepdim=True)
    if beta is None:
        return v - middle, None, middle, None
    free = free.float()
    low, high = free.detach().amin(1, keepdim=True), free.detach().amax(1, keepdim=True)
    small = beta.detach() * (high - low) < SMALL_SPAN
    packing = Packing(beta, high, small)  # a shift lifted as in `Packing.of` erred by 2.9e-6 where 2.2e-6 is allowed
    return v - middle, packing.energies(packing.exponents(free)), middle, packing


def unpack(
    weight: Tensor, of_v: Tensor, of_e: Tensor | None, middle: Tensor, packing: Packing | None, least: Tensor | float
) -> tuple[Terms, Tensor, Tensor | None]:
    """The read from its sums, the rows in doubt and the free energies in doubt.

    least: what a weight has to be to be proven, and a sum of energies where the kernel has added weights below 1.
    """
    rows = ~((weight > 0) & (weight >= least) & (weight < torch.inf))
    weight = torch.where(rows, 1, weight)
    log_weight = torch.where(rows, LOG_ZERO, weight.log())
    mean = torch.where(rows, 0, middle + of_v / weight)
    if packing is None:
        return Terms(log_weight, mean, None), rows, None
    ratio = of_e / weight
    doubt = ~((of_e >= least) & (ratio >= LEAST))
    entries = rows | (doubt & ~packing.small)
    free_energy = packing.shift + packing.logarithm(torch.where(entries, 1, ratio)) / packing.beta
    return Terms(log_weight, mean, torch.where(entries, 0, free_energy)), rows, entries


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


def opaque(name: str, inputs: str, function: Callable[..., Sequence[Tensor]], empty: Callable) -> Callable:
    """`function` of tensors as one operator that torch.compile does not look into, with its gradient.

    The kernels of others break a graph where they are called, and run by autograd functions of their own. The operator
    keeps its inputs; its backward runs the function again and differentiates that. empty: the outputs without values.
    """
    count = inputs.count("Tensor")

    @operator(f"{name}({inputs}) -> Tensor[]")
    def forward(*tensors):
        with torch.no_grad():
            return [x.contiguous() for x in function(*tensors)]

    @operator(f"{name}_backward(Tensor[] grads, bool[] wanted, {inputs}) -> Tensor[]")
    def backward(grads, wanted, *tensors):
        with recorded():
            leaves = [x if x is None else x.detach().requires_grad_(w) for x, w in zip(tensors, wanted)]
            outputs = function(*leaves)
            asked = [x for x, w in zip(leaves, wanted) if w]
            pairs = [(y, grad) for y, grad in zip(outputs, grads) if y.requires_grad]
            outputs, grads = zip(*pairs)
            gradients = torch.autograd.grad(outputs, asked, grads, allow_unused=True)
        return [torch.zeros_like(x) if d is None else d.contiguous() for x, d in zip(asked, gradients)]

    def save(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    def differentiate(ctx, grads):
        tensors, wanted = ctx.saved_tensors, list(ctx.needs_input_grad[:count])
        gradients = iter(backward(grads, wanted, *tensors))
        return tuple(next(gradients) if w else None for w in wanted)

    forward.register_fake(empty)
    backward.register_fake(lambda grads, wanted, *tensors: [x.new_empty(x.shape) for x, w in zip(tensors, wanted) if w])
    forward.register_autograd(differentiate, setup_context=save)
    return forward
