"""The scan behind `ssm_read` in segments, so that training keeps the states of every 64th token alone.

The backward pass goes through the segments from the last to the first and computes the states of each one again from
those at its start: memory O(T d_v) instead of O(T d_v N). D stands for the value channels of all heads.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fem.ops.scaled_sums import Memory, Streams, Sums, leave, leave_backward, nothing
from fem.ops.ssm_stream import Segment, advance, backward, observe

SEGMENT = 64


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
        opens = None if self.opens is None else self.opens[:, piece]
        segment = Segment.of(self.delta[:, piece], self.a, self.b[:, piece], self.c[:, piece], self.skip, opens)
        streams = [(torch.zeros_like(v), v)]
        return segment, streams if self.beta is None else [*streams, (self.beta * v, None)]

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
) -> tuple[Memory, Streams]:
    """What every token reads, (B, T, D), and the states after the last, (B, N D), from those before the first."""
    outputs = _ssm_scan(delta, a, b, c, skip, v, beta, opens, start.parts())
    reads, after = (3, 2) if beta is None else (4, 4)
    return Memory(*outputs[:reads]), Streams.of(outputs[reads : reads + after])


_INPUTS = "Tensor delta, Tensor a, Tensor b, Tensor c, Tensor? skip, Tensor v, Tensor? beta, Tensor? opens"


@torch.library.custom_op("fem::ssm_scan", mutates_args=(), schema=f"({_INPUTS}, Tensor[] start) -> Tensor[]")
def _ssm_scan(delta, a, b, c, skip, v, beta, opens, start):
    """Reads, the states after the last token, then for the backward pass the states at borders and read energies."""
    inputs = Inputs(delta, a, b, c, skip, v, beta, opens)
    states = Streams.of(start)
    borders, seen = [], []
    for piece in inputs.pieces():
        segment, streams = inputs.cut(piece)
        borders.append(states.parts())
        after = [advance(segment, *stream, before) for stream, before in zip(streams, states)]
        seen.append([observe(segment, *s, before, now) for s, before, now in zip(streams, states, after)])
        states = Streams(*after).last()
    seen = [Sums(torch.cat([y.peak for y in ys], 1), torch.cat([y.sums for y in ys], 2)) for ys in zip(*seen)]
    energy = [y.sums[0] for y in seen[1:]]
    return [*leave(Streams(*seen), beta).parts(), *states.parts(), *(torch.stack(x) for x in zip(*borders)), *energy]


@_ssm_scan.register_fake
def _(delta, a, b, c, skip, v, beta, opens, start):
    count = len(range(0, v.shape[1], SEGMENT))
    reads = [v.new_empty(v.shape) for _ in range(3 if beta is None else 4)]
    borders = [part.new_empty(count, *part.shape) for part in start]
    energy = [] if beta is None else [v.new_empty(v.shape)]
    return [*reads, *(torch.empty_like(part) for part in start), *borders, *energy]


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

    for index, piece in reversed(list(enumerate(inputs.pieces()))):
        segment, streams = inputs.cut(piece)
        d_decay = d_input = 0
        d_v[:, piece] = d_c[:, piece] = 0
        for k, (z, payload) in enumerate(streams):
            before = Sums(borders[k].peak[index], borders[k].sums[index])
            grad = backward(d_seen[k][:, :, piece], d_end[k], segment, z, payload, before)
            d_end[k] = grad.start
            d_decay, d_input = d_decay + grad.log_decay, d_input + grad.input
            d_c[:, piece] += grad.c
            d_v[:, piece] += grad.z * beta if payload is None else grad.v
            if payload is None:
                d_beta += (grad.z * v[:, piece]).sum((0, 1))
            if skip is not None:
                d_skip += grad.skip
        rate = delta[:, piece].unsqueeze(-2)
        d_a += (d_decay * rate).sum((0, 1))
        d_b[:, piece] = (d_input * rate).sum(-1)
        d_delta[:, piece] = (d_decay * a + d_input * b[:, piece].unsqueeze(-1)).sum(-2)

    return [d_delta, d_a, d_b, d_c, d_v, *d_end, *(x for x in (d_skip, d_beta) if x is not None)]


@_ssm_scan_backward.register_fake
def _(grads, delta, a, b, c, skip, v, beta, opens, start, outputs):
    return [torch.empty_like(x) for x in (delta, a, b, c, v, *start[1::2], skip, beta) if x is not None]


def _save(ctx, inputs, output):
    *tensors, start = inputs
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
    return d_delta, d_a, d_b, d_c, d_skip, d_v, d_beta, None, d_start


_ssm_scan.register_autograd(_differentiate, setup_context=_save)
