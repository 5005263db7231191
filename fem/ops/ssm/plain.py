"""The scan behind `ssm_read` as one operator, in segments: training keeps the states of every 64th token only.

The backward pass (`gradients`) goes through the segments from the last to the first and computes the states of each one
again from those at its start: memory O(T d_v) instead of O(T d_v N).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fem.ops.common.operator import operator
from fem.ops.common.precision import double, needs_float64
from fem.ops.common.read import LOG_ZERO, NO_WEIGHT, Terms, log, log_average
from fem.ops.common.scaled_sums import add_token, leave
from fem.ops.common.steps import along_time, portable
from fem.ops.common.transforms import again_differentiable, differentiated, transformed
from fem.ops.ssm.gradients import scan_gradients
from fem.ops.ssm.inputs import SCHEMA, SEGMENT, Found, Inputs, by_logarithms, in_plain_numbers, streams_before

ENTRIES = 2**17  # of the states of a segment: half a megabyte of float32, so that a core's cache holds the sums


def ssm_scan(inputs: Inputs, start: list[Tensor], stateless: bool) -> tuple[Terms, list[Tensor]]:
    """What every token reads, (B, T, D), and the states after the last, from those before the first.

    States: peak (B, N D), sums (2, B, N D) and, with a beta, the free energy (B, N D).
    stateless: no initial state; the states after the last token are unused and may be invalid.
    """
    v, reads = inputs.v, len(start)
    one = v.shape[1] == 1 and not differentiated(*inputs, *start)
    if portable() or one or transformed(*inputs, *start):
        outputs = step_by_step(*inputs, *start)
    elif (rows := _rows_at_once(v, inputs.a)) is not None:
        shared = (inputs.a, inputs.skip, inputs.beta)
        cut = [[x] * -(-len(v) // rows) if x is None or any(x is y for y in shared) else x.split(rows) for x in inputs]
        starts = zip(*(part.split(rows, -2) for part in start))
        blocks = [_ssm_scan(*part, list(first), stateless)[: 2 * reads] for *part, first in zip(*cut, starts)]
        outputs = [torch.cat(parts, 0 if n < reads else -2) for n, parts in enumerate(zip(*blocks))]
    else:
        outputs = _ssm_scan(*inputs, start, stateless)
    return Terms(*outputs[:reads]), outputs[reads : 2 * reads]


def _rows_at_once(v: Tensor, a: Tensor) -> int | None:
    """How many rows of the batch are read at a time on a CPU; None: all, as in every graph, whatever its batch."""
    if torch.compiler.is_compiling() or v.device.type != "cpu":
        return None
    rows = max(1, ENTRIES // (min(v.shape[1], SEGMENT) * a.numel()))
    return rows if rows < len(v) else None


def _compute(inputs: Inputs, start: list[Tensor], stateless: bool) -> tuple[Found, bool, bool]:
    """The read, whether it was computed in plain numbers, and whether in float64."""
    in_float64 = needs_float64(inputs.v, inputs.beta)
    inputs = inputs.in_double() if in_float64 else inputs
    start = double(*start) if in_float64 else start
    states, _ = streams_before(start, inputs.a, inputs.beta)
    result = in_plain_numbers(inputs, states) if stateless and inputs.skip is not None else None
    if result is not None:
        return result, True, in_float64
    if needs_float64(inputs.v, inputs.beta, *inputs.logs(slice(None))[:2]):
        in_float64, inputs = True, inputs.in_double()
        states, _ = streams_before(double(*start), inputs.a, inputs.beta)
    return by_logarithms(inputs, states), False, in_float64


@operator(f"ssm_scan({SCHEMA}, Tensor[] start, bool stateless) -> Tensor[]")
def _ssm_scan(*arguments):
    """Reads, the states after the last token, then for the backward pass the peak and the total of the reads, their
    energies, whether this is in plain numbers and in float64, and the states at borders and at the end."""
    *tensors, start, stateless = arguments
    inputs = Inputs(*tensors)
    v, beta = inputs.v, inputs.beta
    (seen, borders, states), *form = _compute(inputs, start, stateless)
    read = leave(seen, beta)
    last = states.weights.rounded(v.dtype)
    free_energy = [] if beta is None else [leave(states, streams_before(start, inputs.a, beta)[1]).free_energy]
    energy = [] if beta is None else [seen.energies.sums[0]]
    outputs = [read.peak + read.total.log(), *read.parts()[2:], *last, *free_energy, read.peak, read.total, *energy]
    outputs = [part.to(v.dtype) for part in outputs]
    form = torch.tensor(form, device=v.device)
    borders = [torch.stack(x).to(v.dtype) for x in zip(*borders, states.parts())]
    return [*outputs, form, *borders]


@_ssm_scan.register_fake
def _(*arguments):
    *tensors, start, _ = arguments
    v, beta = Inputs(*tensors).v, Inputs(*tensors).beta
    count, reads = (v.shape[1] + SEGMENT - 1) // SEGMENT + 1, len(start)
    like_v = lambda count: [v.new_empty(v.shape) for _ in range(count)]  # noqa: E731
    borders = [part.new_empty(count, *part.shape) for part in start[:2]]
    if beta is not None:
        borders += [torch.empty_like(borders[0]), torch.empty_like(borders[1][:, :1])]
    form = v.new_empty(2, dtype=torch.bool)
    return [*like_v(reads), *(torch.empty_like(part) for part in start), *like_v(reads), form, *borders]


def _save(ctx, inputs, output):
    *tensors, start, ctx.stateless = inputs
    ctx.reads = reads = len(start)
    ctx.save_for_backward(*tensors, *start, *output[1:reads], *output[2 * reads :])
    ctx.shapes = [part.shape for part in output[: 2 * reads]]
    ctx.set_materialize_grads(False)


def _differentiate(ctx, grads):
    saved, reads = ctx.saved_tensors, ctx.reads  # read once: checkpointing hands it out but once
    count = len(Inputs._fields)
    inputs, start, outputs = Inputs(*saved[:count]), list(saved[count : count + reads]), saved[count + reads :]
    grads = [start[0].new_zeros(shape) if grad is None else grad for grad, shape in zip(grads, ctx.shapes)]
    if torch.is_grad_enabled():
        of_outputs = [*grads[:reads], None, *grads[reads + 1 : 2 * reads]]
        gradients = again_differentiable(step_by_step, (*inputs, *start), of_outputs)
        return *gradients[:count], gradients[count:], None
    of_outputs = [*grads[:reads], *grads[reads + 1 : 2 * reads]]
    gradients = iter(scan_gradients(of_outputs, *inputs, start, ctx.stateless, outputs))
    d_delta, d_a, d_b, d_c, d_v = (next(gradients) for _ in range(5))
    d_start = [None, *(next(gradients) for _ in start[1:])]
    logs = inputs.log_delta, inputs.log_b, inputs.log_c
    d_skip, d_beta, *d_logs = (None if x is None else next(gradients) for x in (inputs.skip, inputs.beta, *logs))
    if inputs.log_delta is not None:
        d_b = d_c = None
    return *Inputs(d_delta, d_a, d_b, d_c, d_skip, d_v, d_beta, None, *d_logs), d_start, None


_ssm_scan.register_autograd(_differentiate, setup_context=_save)


def step_by_step(delta, a, b, c, skip, v, beta, opens, log_delta, log_b, log_c, *start) -> list[Tensor]:
    """The reads and the last states, by steps that PyTorch can differentiate any number of times."""
    rank, channels = a.shape
    log_delta, log_b, log_c = (log(delta), log(b), log(c)) if log_delta is None else (log_delta, log_b, log_c)
    log_skip = None if skip is None else log(skip)

    def step(before, delta, v, opens, log_delta, log_b, log_c):
        peak, *memory = before
        decay = delta.unsqueeze(-2) * a
        decay = decay if opens is None else decay.masked_fill(opens[:, None, None], -math.inf)
        value = v.unsqueeze(-2).expand_as(decay)
        left = (peak + decay).clamp(min=LOG_ZERO)
        log_input = log_delta.unsqueeze(-2) + log_b.unsqueeze(-1)
        after = add_token(left, *memory, x=log_input, v=value, beta=beta)
        seen_peak, seen_sums, *seen_energy = [left, *memory] if skip is None else after
        scores = seen_peak + seen_sums[0].log() + log_c.unsqueeze(-1)
        items = [seen_sums[1] / seen_sums[0], *seen_energy]
        if skip is not None:
            scores = torch.cat([scores, log_skip.expand_as(scores[:, :1])], 1)
            items = [torch.cat([item, value[:, :1]], 1) for item in items]
        return after, _read_items(scores.clamp(min=LOG_ZERO), items, beta)

    states = [part.unflatten(-1, (rank, channels)) for part in start]
    last, reads = along_time(step, states, delta, v, opens, log_delta, log_b, log_c)
    return [*reads, *(part.flatten(-2) for part in last)]


def _read_items(scores: Tensor, items: list[Tensor], beta: Tensor | None) -> list[Tensor]:
    """Log-weight, mean and free energy of items (B, n, D) with the logarithms of weights `scores`."""
    total = scores.logsumexp(1, keepdim=True)
    empty = total < NO_WEIGHT
    log_p = scores - total
    items = [torch.where(empty, 0, item) for item in items]  # whose p, each 1, is no distribution
    read = [total, (log_p.exp() * items[0]).sum(1, keepdim=True)]
    if beta is not None:
        read.append(log_average(log_p, beta * items[1], 1) / beta)
    return [total.squeeze(1), *(torch.where(empty, 0, part).squeeze(1) for part in read[1:])]
