"""The scan behind `ssm_read` in segments, so that training keeps the states of every 64th token alone.

The backward pass goes through the segments from the last to the first and computes the states of each one again from
those at its start: memory O(T d_v) instead of O(T d_v N). D stands for the value channels of all heads. A read that
plain numbers hold goes by `ssm_direct`, any other by the logarithms of `ssm_stream`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fem.ops.common.scaled_sums import Memory, Streams, Sums, leave, leave_backward, nothing
from fem.ops.ssm import numbers as ssm_direct
from fem.ops.ssm.logarithms import Segment, advance, backward, observe

SEGMENT = 64
ENTRIES = 2**17  # of the states of a segment: half a megabyte of float32, so that a core's cache holds the sums


class Inputs(NamedTuple):
    """delta, v (B, T, D), a (N, D), b and c (B, T, N), skip and beta (D), opens (B, T); the last three may be None.

    Without the skip a token does not read itself, only what stood before it. opens: the tokens that open a document.
    """

    delta: Tensor
    a: Tensor
    b: Tensor
    c: Tensor
    skip: Tensor | None
    v: Tensor
    beta: Tensor | None
    opens: Tensor | None

    def cut(self, piece: slice) -> tuple[Segment, list[tuple[Tensor, Tensor | None]]]:
        """A segment, and the (z, payload) of its streams."""
        v = self.v[:, piece]
        log_input = self.delta[:, piece].log().unsqueeze(-2) + self.b[:, piece].log().unsqueeze(-1)
        segment = Segment(self.log_decay(piece), log_input, self.c[:, piece], self.skip)
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


def ssm_scan(
    delta: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor | None,
    v: Tensor,
    beta: Tensor | None,
    opens: Tensor | None,
    start: Streams,
    alone: bool,
) -> tuple[Memory, Streams]:
    """What every token reads, (B, T, D), and the states after the last, (B, N D), from those before the first.

    alone: nothing came before the first token and nobody wants the states after the last, which may be wrong then.
    """
    rows = max(1, ENTRIES // (min(v.shape[1], SEGMENT) * a.numel()))
    if v.device.type == "cpu" and len(v) > rows and not torch.compiler.is_compiling():
        count = -(-len(v) // rows)
        cut = [[None] * count if x is None else x.split(rows) for x in (delta, b, c, v, opens)]
        starts = map(list, zip(*(part.split(rows, -2) for part in start.parts())))
        found = [
            ssm_scan(delta, a, b, c, skip, v, beta, opens, Streams.of(start), alone)
            for delta, b, c, v, opens, start in zip(*cut, starts)
        ]
        reads, after = (zip(*(each.parts() for each in side)) for side in zip(*found))
        return Memory(*map(torch.cat, reads)), Streams.of([torch.cat(parts, -2) for parts in after])
    outputs = _ssm_scan(delta, a, b, c, skip, v, beta, opens, start.parts(), alone)
    reads, after = (3, 2) if beta is None else (4, 4)
    return Memory(*outputs[:reads]), Streams.of(outputs[reads : reads + after])


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
    """None where plain numbers do not hold it."""
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


_INPUTS = "Tensor delta, Tensor a, Tensor b, Tensor c, Tensor? skip, Tensor v, Tensor? beta, Tensor? opens"


@torch.library.custom_op(
    "fem::ssm_scan", mutates_args=(), schema=f"({_INPUTS}, Tensor[] start, bool alone) -> Tensor[]"
)
def _ssm_scan(delta, a, b, c, skip, v, beta, opens, start, alone):
    """Reads, the states after the last token, then for the backward pass the states at borders, whether these are plain
    numbers, and read energies."""
    inputs, start = Inputs(delta, a, b, c, skip, v, beta, opens), Streams.of(start)
    found = _in_plain_numbers(inputs, start) if alone and skip is not None else None
    plain = torch.tensor(found is not None, device=v.device)
    seen, borders, states = found or _by_logarithms(inputs, start)
    energy = [] if beta is None else [seen.energies.sums[0]]
    return [*leave(seen, beta).parts(), *states.parts(), *(torch.stack(x) for x in zip(*borders)), plain, *energy]


@_ssm_scan.register_fake
def _(delta, a, b, c, skip, v, beta, opens, start, alone):
    count = len(range(0, v.shape[1], SEGMENT))
    reads = [v.new_empty(v.shape) for _ in range(3 if beta is None else 4)]
    borders = [part.new_empty(count, *part.shape) for part in start]
    energy = [] if beta is None else [v.new_empty(v.shape)]
    plain = v.new_empty((), dtype=torch.bool)
    return [*reads, *(torch.empty_like(part) for part in start), *borders, plain, *energy]


class SegmentGradients(NamedTuple):
    """Gradients of a segment, from those of what its tokens see and of the states after it."""

    log_decay: Tensor
    input: Tensor  # of delta B, (B, T, N, D)
    c: Tensor
    v: Tensor
    beta: Tensor | None
    skip: Tensor | None
    before: list[Tensor]  # of the states' sums, one for each stream


def _through_logarithms(
    inputs: Inputs, piece: slice, before: Streams, d_y: list[Tensor], d_end: list[Tensor]
) -> SegmentGradients:
    segment, streams = inputs.cut(piece)
    parts = [
        backward(one, end, segment, z, payload, start)
        for one, end, (z, payload), start in zip(d_y, d_end, streams, before)
    ]
    d_v, d_beta = parts[0].v, None
    if inputs.beta is not None:
        d_v, d_beta = d_v + parts[1].z * inputs.beta, (parts[1].z * inputs.v[:, piece]).sum((0, 1))
    skip = None if inputs.skip is None else sum(part.skip for part in parts)
    shared = [sum(each) for each in zip(*((part.log_decay, part.input, part.c) for part in parts))]
    return SegmentGradients(*shared, d_v, d_beta, skip, [part.start for part in parts])


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
    return SegmentGradients(grad.log_decay, grad.added, grad.c, d_v, d_beta, grad.skip, d_before)


@torch.library.custom_op(
    "fem::ssm_scan_backward",
    mutates_args=(),
    schema=f"(Tensor[] grads, {_INPUTS}, Tensor[] start, Tensor[] outputs) -> Tensor[]",
)
def _ssm_scan_backward(grads, delta, a, b, c, skip, v, beta, opens, start, outputs):
    """Gradients of delta, a, b, c, v, the start without its peak, and, where there are any, skip and beta."""
    inputs = Inputs(delta, a, b, c, skip, v, beta, opens)
    reads, outputs = (outputs[:3], outputs[3:]) if beta is None else (outputs[:4], outputs[4:])
    reads, borders = Memory(*reads), Streams.of(outputs[len(start) : 2 * len(start)])
    energy = None if beta is None else outputs[-1]
    d_reads, d_end = Memory(None, *grads[: len(reads.parts()) - 1]), list(grads[len(reads.parts()) - 1 :])
    *d_seen, d_beta = leave_backward(d_reads, reads, energy, beta)
    nowhere = reads.peak < nothing(v.dtype) / 2
    d_seen = [None if part is None else part.masked_fill_(nowhere, 0) for part in d_seen]
    d_delta, d_b, d_c, d_v = (torch.empty_like(x) for x in (delta, b, c, v))
    d_a, d_skip = torch.zeros_like(a), None if skip is None else torch.zeros_like(skip)
    d_beta = None if beta is None else d_beta.sum((0, 1))
    through = _through_plain_numbers if outputs[2 * len(start)] else _through_logarithms

    for index, piece in reversed(list(enumerate(inputs.pieces()))):
        before = Streams(*(Sums(*(part[index] for part in stream)) for stream in borders if stream is not None))
        d_y = [part[:, :, piece] for part in d_seen if part is not None]
        grad = through(inputs, piece, before, d_y, d_end)
        d_end = grad.before
        d_c[:, piece], d_v[:, piece] = grad.c, grad.v
        if beta is not None:
            d_beta += grad.beta
        if skip is not None:
            d_skip += grad.skip
        rate = delta[:, piece].unsqueeze(-2)
        d_a += (grad.log_decay * rate).sum((0, 1))
        d_b[:, piece] = (grad.input * rate).sum(-1)
        d_delta[:, piece] = (grad.log_decay * a + grad.input * b[:, piece].unsqueeze(-1)).sum(-2)

    return [d_delta, d_a, d_b, d_c, d_v, *d_end, *(x for x in (d_skip, d_beta) if x is not None)]


@_ssm_scan_backward.register_fake
def _(grads, delta, a, b, c, skip, v, beta, opens, start, outputs):
    return [torch.empty_like(x) for x in (delta, a, b, c, v, *start[1::2], skip, beta) if x is not None]


def _save(ctx, inputs, output):
    *tensors, start, _ = inputs
    ctx.save_for_backward(*tensors, *start, *output)
    ctx.parts = len(start)


def _differentiate(ctx, grads):
    saved, parts = ctx.saved_tensors, ctx.parts  # read once: checkpointing hands it out but once
    tensors, start, outputs = saved[:8], saved[8 : 8 + parts], saved[8 + parts :]
    reads = 3 if tensors[6] is None else 4
    given = [*grads[1:reads], *grads[reads : reads + parts][1::2]]
    d_delta, d_a, d_b, d_c, d_v, *rest = _ssm_scan_backward(given, *tensors, start, outputs)
    rest = iter(rest)
    d_start = [next(rest) if part % 2 else None for part in range(parts)]
    d_skip, d_beta = (None if x is None else next(rest) for x in (tensors[4], tensors[6]))
    return d_delta, d_a, d_b, d_c, d_skip, d_v, d_beta, None, d_start, None


_ssm_scan.register_autograd(_differentiate, setup_context=_save)
