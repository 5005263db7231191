"""The scan behind `ssm_read` in segments, so that training keeps the states of every 64th token alone.

The backward pass goes through the segments from the last to the first and computes the states of each one again from
those at its start: memory O(T d_v) instead of O(T d_v N). D stands for the value channels of all heads. Where no sum
over- or underflows, the read is computed by `numbers`, else by `logarithms`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fem.ops.common.precision import double, needs_float64
from fem.ops.common.read import LOG_ZERO, NO_WEIGHT, Terms, log_average
from fem.ops.common.scaled_sums import (
    Memory,
    Streams,
    Sums,
    add_token,
    end_backward,
    leave,
    leave_backward,
    start_backward,
)
from fem.ops.common.steps import along_time, portable
from fem.ops.common.transforms import again_differentiable, differentiated, transformed
from fem.ops.ssm import numbers as ssm_direct
from fem.ops.ssm.logarithms import Segment, advance, backward, observe

SEGMENT = 64
ENTRIES = 2**17  # of the states of a segment: half a megabyte of float32, so that a core's cache holds the sums


class Inputs(NamedTuple):
    """delta, v (B, T, D), a (N, D), b and c (B, T, N), skip and beta (D), opens (B, T), log_delta, log_b, log_c.

    From skip on all but v may be None. Without the skip a token does not read itself, only what stood before it. opens:
    the tokens that open a document. Where logarithms are given, the gradients of delta, b and c go to them.
    """

    delta: Tensor
    a: Tensor
    b: Tensor
    c: Tensor
    skip: Tensor | None
    v: Tensor
    beta: Tensor | None
    opens: Tensor | None
    log_delta: Tensor | None
    log_b: Tensor | None
    log_c: Tensor | None

    def in_double(self) -> Inputs:
        return Inputs(*(x if x is self.opens else None if x is None else x.double() for x in self))

    def logs(self, piece: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Of delta, b and c."""
        if self.log_delta is not None:
            return self.log_delta[:, piece], self.log_b[:, piece], self.log_c[:, piece]
        return tuple(x[:, piece].log() for x in (self.delta, self.b, self.c))

    def any_zeros(self) -> bool:
        """Whether a factor is exactly 0: its gradient cannot be had from that of its logarithm."""
        zero = torch.zeros((), dtype=torch.bool, device=self.v.device)
        if self.log_delta is None:
            zero = (self.delta == 0).any() | (self.b == 0).any() | (self.c == 0).any()
        return bool(zero if self.skip is None else zero | (self.skip == 0).any())

    def cut(self, piece: slice) -> tuple[Segment, list[tuple[Tensor, Tensor | None]]]:
        """A segment, and the (z, payload) of its streams."""
        v = self.v[:, piece]
        log_delta, log_b, log_c = self.logs(piece)
        log_input = log_delta.unsqueeze(-2) + log_b.unsqueeze(-1)
        log_skip = None if self.skip is None else self.skip.log()
        segment = Segment(self.log_decay(piece), log_input, log_c, log_skip)
        streams = [(torch.zeros_like(v), v)]
        return segment, streams if self.beta is None else [*streams, (self.beta * v, None)]

    def steps(self, piece: slice, largest: Tensor | None) -> ssm_direct.Steps:
        """A segment in plain numbers; energies are relative to the largest beta v of each channel, (B, D)."""
        v = self.v[:, piece]
        payload = [torch.ones_like(v), v]
        if self.beta is not None:
            payload.append((self.beta * v - largest.unsqueeze(1)).exp_())
        added = self.delta[:, piece].unsqueeze(-2) * self.b[:, piece].unsqueeze(-1)
        return ssm_direct.Steps(self.log_decay(piece), added, self.c[:, piece], self.skip, torch.stack(payload))

    def log_decay(self, piece: slice) -> Tensor:
        """Into each token of a segment, (B, T, N, D)."""
        log_decay = self.delta[:, piece].unsqueeze(-2) * self.a
        if self.opens is not None:
            log_decay.masked_fill_(self.opens[:, piece, None, None], -math.inf)
        return log_decay

    def pieces(self) -> list[slice]:
        return [slice(first, first + SEGMENT) for first in range(0, self.v.shape[1], SEGMENT)]


def ssm_scan(inputs: Inputs, start: list[Tensor], alone: bool) -> tuple[Terms, list[Tensor]]:
    """What every token reads, (B, T, D), and the states after the last, from those before the first.

    States: peak (B, N D), sums (2, B, N D) and, with a beta, the free energy (B, N D).
    alone: stateless: no initial state is given, and the states after the last token are not used; they may be wrong.
    """
    v, reads = inputs.v, len(start)
    one = v.shape[1] == 1 and not differentiated(*inputs, *start)
    if portable() or one or transformed(*inputs, *start):
        outputs = step_by_step(*inputs, *start)
    elif _splits(v, inputs.a):
        rows = max(1, ENTRIES // (min(v.shape[1], SEGMENT) * inputs.a.numel()))
        shared = (inputs.a, inputs.skip, inputs.beta)
        cut = [[x] * -(-len(v) // rows) if x is None or any(x is y for y in shared) else x.split(rows) for x in inputs]
        starts = zip(*(part.split(rows, -2) for part in start))
        found = [_ssm_scan(*part, list(first), alone)[: 2 * reads] for *part, first in zip(*cut, starts)]
        outputs = [torch.cat(parts, 0 if n < reads else -2) for n, parts in enumerate(zip(*found))]
    else:
        outputs = _ssm_scan(*inputs, start, alone)
    return Terms(*outputs[:reads]), outputs[reads : 2 * reads]


def _splits(v: Tensor, a: Tensor) -> bool:
    """Whether the rows of the batch are read in parts, on a CPU."""
    if torch.compiler.is_compiling() or v.device.type != "cpu":
        return False
    return len(v) > max(1, ENTRIES // (min(v.shape[1], SEGMENT) * a.numel()))


def step_by_step(delta, a, b, c, skip, v, beta, opens, log_delta, log_b, log_c, *start) -> list[Tensor]:
    """The reads and the last states, by steps that PyTorch can differentiate any number of times."""
    rank, channels = a.shape
    log_delta, log_b, log_c = (delta.log(), b.log(), c.log()) if log_delta is None else (log_delta, log_b, log_c)
    log_skip = None if skip is None else skip.log()

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
    log_p = scores - total
    read = [total, (log_p.exp() * items[0]).sum(1, keepdim=True)]
    if beta is not None:
        read.append(log_average(log_p, beta * items[1], 1) / beta)
    empty = total < NO_WEIGHT
    return [total.squeeze(1), *(torch.where(empty, 0, part).squeeze(1) for part in read[1:])]


Found = tuple[Streams, list[list[Tensor]], Streams]  # what tokens see, states at borders, those after the last token


def _by_logarithms(inputs: Inputs, states: Streams) -> Found:
    borders, seen = [], []
    for piece in inputs.pieces():
        segment, streams = inputs.cut(piece)
        borders.append(states.parts())
        after = [advance(segment, *stream, before) for stream, before in zip(streams, states)]
        seen.append([observe(segment, *s, before, now) for s, before, now in zip(streams, states, after)])
        states = Streams(*after).last()
    seen = [Sums(torch.cat([y.peak for y in ys], 1), torch.cat([y.sums for y in ys], 2)) for ys in zip(*seen)]
    return Streams(*seen), borders, states


def _in_plain_numbers(inputs: Inputs, start: Streams) -> Found | None:
    """The read by `numbers`; None where a sum over- or underflows."""
    largest = None if inputs.beta is None else (inputs.beta * inputs.v).amax(1)

    def streams(sums: Tensor) -> Streams:
        """Sums relative to 1 and, of energies, to the largest."""
        weights = Sums(torch.zeros_like(sums[0]), sums[:2].clone())
        if largest is None:
            return Streams(weights)
        peak = largest.repeat(1, sums.shape[-1] // largest.shape[-1]).view(len(largest), *[1] * (sums.dim() - 3), -1)
        return Streams(weights, Sums(peak.expand_as(sums[0]).clone(), sums[2:].clone()))

    states = start.weights.peak.new_zeros(2 if largest is None else 3, *start.weights.peak.shape)
    borders, seen = [], []
    for piece in inputs.pieces():
        steps = inputs.steps(piece, largest)
        borders.append(streams(states).parts())
        after = steps.states(states)
        seen.append(ssm_direct.observe(steps, after))
        states = after[:, :, -1].clone()
    seen = torch.cat(seen, 2)
    return (streams(seen), borders, streams(states)) if ssm_direct.held(seen) else None


_INPUTS = (
    "Tensor delta, Tensor a, Tensor b, Tensor c, Tensor? skip, Tensor v, Tensor? beta, Tensor? opens, "
    "Tensor? log_delta, Tensor? log_b, Tensor? log_c"
)


def _start(start: list[Tensor], a: Tensor, beta: Tensor | None) -> tuple[Streams, Tensor | None]:
    """The streams before the first token, and the temperature of every state, (N D)."""
    per_state = None if beta is None else beta.repeat(len(a))
    return Streams.after(*start, beta=per_state), per_state


def _found(inputs: Inputs, start: list[Tensor], alone: bool) -> tuple[Found, bool, bool]:
    """The read, whether it was computed in plain numbers, and whether in float64."""
    in_float64 = needs_float64(inputs.v, inputs.beta)
    inputs = inputs.in_double() if in_float64 else inputs
    start = double(*start) if in_float64 else start
    states, _ = _start(start, inputs.a, inputs.beta)
    found = _in_plain_numbers(inputs, states) if alone and inputs.skip is not None else None
    if found is not None:
        return found, True, in_float64
    if needs_float64(inputs.v, inputs.beta, *inputs.logs(slice(None))[:2]):
        in_float64, inputs = True, inputs.in_double()
        states, _ = _start(double(*start), inputs.a, inputs.beta)
    return _by_logarithms(inputs, states), False, in_float64


@torch.library.custom_op(
    "fem::ssm_scan", mutates_args=(), schema=f"({_INPUTS}, Tensor[] start, bool alone) -> Tensor[]"
)
def _ssm_scan(delta, a, b, c, skip, v, beta, opens, log_delta, log_b, log_c, start, alone):
    """Reads, the states after the last token, then for the backward pass the peak and the total of the reads, their
    energies, whether this is in plain numbers and in float64, and the states at borders and at the end."""
    inputs = Inputs(delta, a, b, c, skip, v, beta, opens, log_delta, log_b, log_c)
    (seen, borders, states), *how = _found(inputs, start, alone)
    read = leave(seen, beta)
    last = states.weights.rounded(v.dtype)
    free_energy = [] if beta is None else [leave(states, _start(start, a, beta)[1]).free_energy]
    energy = [] if beta is None else [seen.energies.sums[0]]
    outputs = [read.log_weight(), *read.parts()[2:], *last, *free_energy, read.peak, read.total, *energy]
    outputs = [part.to(v.dtype) for part in outputs]
    how = torch.tensor(how, device=v.device)
    borders = [torch.stack(x).to(v.dtype) for x in zip(*borders, states.parts())]
    return [*outputs, how, *borders]


@_ssm_scan.register_fake
def _(delta, a, b, c, skip, v, beta, opens, log_delta, log_b, log_c, start, alone):
    count, reads = (v.shape[1] + SEGMENT - 1) // SEGMENT + 1, len(start)
    whole = lambda count: [v.new_empty(v.shape) for _ in range(count)]  # noqa: E731
    borders = [part.new_empty(count, *part.shape) for part in start[:2]]
    if beta is not None:
        borders += [torch.empty_like(borders[0]), torch.empty_like(borders[1][:, :1])]
    how = v.new_empty(2, dtype=torch.bool)
    return [*whole(reads), *(torch.empty_like(part) for part in start), *whole(reads), how, *borders]


class SegmentGradients(NamedTuple):
    """Gradients of a segment, from those of what its tokens see and of the states after it."""

    log_decay: Tensor
    delta: Tensor  # as far as it enters the states; (B, T, D)
    b: Tensor
    c: Tensor
    v: Tensor
    beta: Tensor | None
    skip: Tensor | None
    before: list[Tensor]  # of the states' sums, one for each stream


def _total(parts) -> Tensor | None:
    parts = list(parts)
    return None if parts[0] is None else sum(parts)


def _of_number(number: Tensor, of_log: Tensor, at_zero: Tensor | None) -> Tensor:
    """The gradient of a number from that of its logarithm; where the number is 0, its own."""
    return of_log / number if at_zero is None else torch.where(number > 0, of_log / number, at_zero)


def _through_logarithms(
    inputs: Inputs, piece: slice, before: Streams, d_y: list[Tensor], d_end: list[Tensor]
) -> SegmentGradients:
    segment, streams = inputs.cut(piece)
    zeros = inputs.any_zeros()
    parts = [
        backward(one, end, segment, z, payload, start, zeros)
        for one, end, (z, payload), start in zip(d_y, d_end, streams, before)
    ]
    d_v, d_beta = parts[0].v, None
    if inputs.beta is not None:
        d_v, d_beta = d_v + parts[1].z * inputs.beta, (parts[1].z * inputs.v[:, piece]).sum((0, 1))
    d_input, d_c, d_skip = (_total(part[n] for part in parts) for n in (1, 2, 3))
    d_delta, d_b = d_input.sum(-2), d_input.sum(-1)
    of_delta = of_b = of_c = of_skip = None
    delta, b, c = (x[:, piece] for x in (inputs.delta, inputs.b, inputs.c))
    if zeros:
        of_input, of_c, of_skip = (_total(x) for x in zip(*(part.at_zeros for part in parts)))
        of_delta, of_b = (of_input * b.unsqueeze(-1)).sum(-2), (of_input * delta.unsqueeze(-2)).sum(-1)
    if inputs.log_delta is None:
        d_delta, d_b = _of_number(delta, d_delta, of_delta), _of_number(b, d_b, of_b)
        d_c = _of_number(c, d_c, of_c)
    if d_skip is not None:
        d_skip = _of_number(inputs.skip, d_skip, of_skip)
    d_decay = _total(part.log_decay for part in parts)
    return SegmentGradients(d_decay, d_delta, d_b, d_c, d_v, d_beta, d_skip, [part.start for part in parts])


def _through_plain_numbers(
    inputs: Inputs, piece: slice, before: Streams, d_y: list[Tensor], d_end: list[Tensor]
) -> SegmentGradients:
    largest = None if before.energies is None else before.energies.peak[:, : inputs.v.shape[-1]]
    steps = inputs.steps(piece, largest)
    start = torch.cat([stream.sums for stream in before if stream is not None])
    grad = ssm_direct.backward(torch.cat(d_y), torch.cat(d_end), steps, start)
    d_v, d_beta = grad.payload[1], None
    if inputs.beta is not None:
        d_energy = grad.payload[2] * steps.payload[2]
        d_v, d_beta = d_v + d_energy * inputs.beta, (d_energy * inputs.v[:, piece]).sum((0, 1))
    d_before = [part.clone() for part in grad.start.split([len(end) for end in d_end])]
    delta, b = inputs.delta[:, piece], inputs.b[:, piece]
    d_delta, d_b = (grad.added * b.unsqueeze(-1)).sum(-2), (grad.added * delta.unsqueeze(-2)).sum(-1)
    d_c = grad.c
    if inputs.log_delta is not None:
        d_delta, d_b, d_c = d_delta * delta, d_b * b, d_c * inputs.c[:, piece]
    return SegmentGradients(grad.log_decay, d_delta, d_b, d_c, d_v, d_beta, grad.skip, d_before)


@torch.library.custom_op(
    "fem::ssm_scan_backward",
    mutates_args=(),
    schema=f"(Tensor[] grads, {_INPUTS}, Tensor[] start, bool alone, Tensor[] saved) -> Tensor[]",
)
def _ssm_scan_backward(grads, delta, a, b, c, skip, v, beta, opens, log_delta, log_b, log_c, start, alone, saved):
    """Gradients of delta, a, b, c, v, the start without its peak, then, where there are any, of skip, beta and the
    logarithms."""
    inputs, dtype, reads = Inputs(delta, a, b, c, skip, v, beta, opens, log_delta, log_b, log_c), v.dtype, len(start)
    read, of_read, (how, *borders) = saved[: reads - 1], saved[reads - 1 : 2 * reads - 1], saved[2 * reads - 1 :]
    plain, in_float64 = how.tolist()
    if in_float64:  # what was saved is rounded
        inputs, start, grads = inputs.in_double(), double(*start), double(*grads)
    before, per_state = _start(start, inputs.a, inputs.beta)
    if in_float64:
        seen, borders, after = _in_plain_numbers(inputs, before) if plain else _by_logarithms(inputs, before)
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
        if not alone:
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
        grad = through(inputs, piece, states, d_y, d_end)
        d_end = grad.before
        d_b[:, piece], d_c[:, piece], d_v[:, piece], in_delta[:, piece] = grad.b, grad.c, grad.v, grad.delta
        if beta is not None:
            d_beta += grad.beta
        if skip is not None:
            d_skip += grad.skip
        d_a += (grad.log_decay * delta[:, piece].unsqueeze(-2)).sum((0, 1))
        d_delta[:, piece] = (grad.log_decay * a).sum(-2)

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


@_ssm_scan_backward.register_fake
def _(grads, delta, a, b, c, skip, v, beta, opens, log_delta, log_b, log_c, start, alone, saved):
    if log_delta is not None:
        b, c = (x.new_empty(0) for x in (b, c))
    like = (delta, a, b, c, v, *start[1:], skip, beta, log_delta, log_b, log_c)
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in like if x is not None]


def _save(ctx, inputs, output):
    *tensors, start, ctx.alone = inputs
    ctx.reads = reads = len(start)
    ctx.save_for_backward(*tensors, *start, *output[1:reads], *output[2 * reads :])
    ctx.shapes = [part.shape for part in output[: 2 * reads]]
    ctx.set_materialize_grads(False)


def _differentiate(ctx, grads):
    saved, reads = ctx.saved_tensors, ctx.reads  # read once: checkpointing hands it out but once
    tensors, start, outputs = saved[:11], list(saved[11 : 11 + reads]), saved[11 + reads :]
    grads = [start[0].new_zeros(shape) if grad is None else grad for grad, shape in zip(grads, ctx.shapes)]
    if torch.is_grad_enabled():
        given = [*grads[:reads], None, *grads[reads + 1 : 2 * reads]]
        found = again_differentiable(step_by_step, (*tensors, *start), given)
        return *found[:11], found[11:], None
    given = [*grads[:reads], *grads[reads + 1 : 2 * reads]]
    found = iter(_ssm_scan_backward(given, *tensors, start, ctx.alone, outputs))
    d_delta, d_a, d_b, d_c, d_v = (next(found) for _ in range(5))
    d_start = [None, *(next(found) for _ in start[1:])]
    d_skip, d_beta, *d_logs = (None if tensors[n] is None else next(found) for n in (4, 6, 8, 9, 10))
    if tensors[8] is not None:
        d_b = d_c = None
    return d_delta, d_a, d_b, d_c, d_skip, d_v, d_beta, None, *d_logs, d_start, None


_ssm_scan.register_autograd(_differentiate, setup_context=_save)
