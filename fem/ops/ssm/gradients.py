"""The gradients of the scan behind `ssm_read`, segments from the last to the first, the states of each made again."""

from __future__ import annotations

import torch
from torch import Tensor

from fem.ops.common.operator import operator
from fem.ops.common.precision import double
from fem.ops.common.read import NO_WEIGHT
from fem.ops.common.scaled_sums import Memory, Streams, Sums, end_backward, leave, leave_backward, start_backward
from fem.ops.ssm import numbers
from fem.ops.ssm.inputs import SCHEMA, Inputs, by_logarithms, in_plain_numbers, streams_before
from fem.ops.ssm.logarithms import backward

# Gradients of a segment from those of what its tokens see and of the states after it: of log_decay; delta, as far as it
# enters the states, b, c and v; beta; skip; and of the sums of the states before it, one for each stream.
SegmentGradients = tuple[Tensor, tuple[Tensor, ...], Tensor | None, Tensor | None, list[Tensor]]


def _of_number(number: Tensor, of_log: Tensor) -> Tensor:
    """The gradient of a number from that of its logarithm; 0 where the number is 0."""
    return torch.where(number > 0, of_log / number, 0)


def _through_logarithms(
    inputs: Inputs, piece: slice, before: Streams, d_y: list[Tensor], d_end: list[Tensor]
) -> SegmentGradients:
    segment, streams = inputs.cut(piece)
    parts = [backward(*ends, segment, *stream, start) for *ends, stream, start in zip(d_y, d_end, streams, before)]
    of_segment, d_z, (d_v, *_), d_before = zip(*parts)
    d_decay, d_input, d_c, d_skip = (None if x[0] is None else sum(x) for x in zip(*of_segment))
    d_beta = None
    if inputs.beta is not None:
        d_v, d_beta = d_v + d_z[1] * inputs.beta, (d_z[1] * inputs.v[:, piece]).sum((0, 1))
    d_delta, d_b = d_input.sum(-2), d_input.sum(-1)
    if inputs.log_delta is None:
        factors = (inputs.delta[:, piece], d_delta), (inputs.b[:, piece], d_b), (inputs.c[:, piece], d_c)
        d_delta, d_b, d_c = (_of_number(*factor) for factor in factors)
    if d_skip is not None:
        d_skip = _of_number(inputs.skip, d_skip)
    return d_decay, (d_delta, d_b, d_c, d_v), d_beta, d_skip, list(d_before)


def _through_plain_numbers(
    inputs: Inputs, piece: slice, before: Streams, d_y: list[Tensor], d_end: list[Tensor]
) -> SegmentGradients:
    largest = None if before.energies is None else before.energies.peak[:, : inputs.v.shape[-1]]
    steps = inputs.steps(piece, largest)
    start = torch.cat([stream.sums for stream in before if stream is not None])
    grad, d_start = numbers.backward(torch.cat(d_y), torch.cat(d_end), steps, start)
    d_v, d_beta = grad.payload[1], None
    if inputs.beta is not None:
        d_energy = grad.payload[2] * steps.payload[2]
        d_v, d_beta = d_v + d_energy * inputs.beta, (d_energy * inputs.v[:, piece]).sum((0, 1))
    d_before = [part.clone() for part in d_start.split([len(end) for end in d_end])]
    delta, b = inputs.delta[:, piece], inputs.b[:, piece]
    d_delta, d_b = (grad.added * b.unsqueeze(-1)).sum(-2), (grad.added * delta.unsqueeze(-2)).sum(-1)
    d_c = grad.c
    if inputs.log_delta is not None:
        d_delta, d_b, d_c = d_delta * delta, d_b * b, d_c * inputs.c[:, piece]
    return grad.log_decay, (d_delta, d_b, d_c, d_v), d_beta, grad.skip, d_before


@operator(f"ssm_scan_backward(Tensor[] grads, {SCHEMA}, Tensor[] start, bool stateless, Tensor[] saved) -> Tensor[]")
def scan_gradients(grads, delta, a, b, c, skip, v, beta, opens, log_delta, log_b, log_c, start, stateless, saved):
    """Gradients of delta, a, b, c, v, the start without its peak, then, where there are any, of skip, beta and the
    logarithms."""
    inputs, dtype, reads = Inputs(delta, a, b, c, skip, v, beta, opens, log_delta, log_b, log_c), v.dtype, len(start)
    read, of_read, (forms, *borders) = saved[: reads - 1], saved[reads - 1 : 2 * reads - 1], saved[2 * reads - 1 :]
    plain, in_float64 = forms.tolist()
    if in_float64:  # what was saved is rounded
        inputs, start, grads = inputs.in_double(), double(*start), double(*grads)
    before, per_state = streams_before(start, inputs.a, inputs.beta)
    if in_float64:
        seen, borders, after = in_plain_numbers(inputs, before) if plain else by_logarithms(inputs, before)
        memory, energy = leave(seen, inputs.beta), None if beta is None else seen.energies.sums[0]
        borders = [torch.stack(x) for x in zip(*borders)]
        grads[reads] = grads[reads] * (after.weights.peak - after.weights.rounded(dtype).peak).clamp(-1, 1).exp()
    else:
        memory = Memory(*of_read[:2], *read)
        energy = None if beta is None else of_read[2]
        after = Streams.of([x[-1] for x in borders])
    borders = Streams.of(borders)
    delta, a, b, c, skip, v, beta = inputs[:7]
    d_log_weight, *d_read, d_last = grads[: reads + 1]
    *d_seen, d_beta = leave_backward(Memory(None, d_log_weight / memory.total, *d_read), memory, energy, beta)
    nowhere = memory.peak < NO_WEIGHT
    d_seen = [None if part is None else part.masked_fill_(nowhere, 0) for part in d_seen]
    d_beta = None if beta is None else d_beta.masked_fill(nowhere, 0).sum((0, 1))
    d_end = [d_last.clone()]
    if beta is not None:
        d_end.append(torch.zeros_like(d_last[:1]))
        if not stateless:
            d_energy, of_beta = end_backward(grads[reads + 1], d_end[0], after, per_state)
            d_end[1] += d_energy
            d_beta += of_beta.sum(0).view_as(a).sum(0)

    d_delta, d_v, in_delta = (torch.empty_like(x) for x in (delta, v, delta))
    d_b, d_c = torch.empty_like(b), torch.empty_like(c)
    d_a, d_skip = torch.zeros_like(a), None if skip is None else torch.zeros_like(skip)
    through = _through_plain_numbers if plain else _through_logarithms
    for index, piece in reversed(list(enumerate(inputs.pieces()))):
        states = Streams(*(Sums(*(part[index] for part in stream)) for stream in borders if stream is not None))
        d_y = [part[:, :, piece] for part in d_seen if part is not None]
        d_decay, of_tokens, of_beta, of_skip, d_end = through(inputs, piece, states, d_y, d_end)
        in_delta[:, piece], d_b[:, piece], d_c[:, piece], d_v[:, piece] = of_tokens
        if beta is not None:
            d_beta += of_beta
        if skip is not None:
            d_skip += of_skip
        d_a += (d_decay * delta[:, piece].unsqueeze(-2)).sum((0, 1))
        d_delta[:, piece] = (d_decay * a).sum(-2)

    d_start = [d_end[0]]
    if beta is not None:
        d_free_energy, of_beta = start_backward(d_end[1], d_end[0], before, start[2], per_state)
        d_start.append(d_free_energy)
        d_beta = d_beta + of_beta.sum(0).view_as(a).sum(0)
    if log_delta is None:
        results = [d_delta + in_delta, d_a, d_b, d_c, d_v, *d_start, d_skip, d_beta]
    else:
        none = d_b.new_empty(0)
        results = [d_delta, d_a, none, none.clone(), d_v, *d_start, d_skip, d_beta, in_delta, d_b, d_c]
    return [x.to(dtype) for x in results if x is not None]


@scan_gradients.register_fake
def _(grads, delta, a, b, c, skip, v, beta, opens, log_delta, log_b, log_c, start, stateless, saved):
    if log_delta is not None:
        b, c = (x.new_empty(0) for x in (b, c))
    like = (delta, a, b, c, v, *start[1:], skip, beta, log_delta, log_b, log_c)
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in like if x is not None]
