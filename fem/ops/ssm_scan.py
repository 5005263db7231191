"""The scan behind `ssm_read` in segments, so that training keeps the states of every 64th token alone.

The backward pass goes through the segments from the last to the first and computes the states of each one again from
those at its start: memory O(T d_v) instead of O(T d_v N). D stands for the value channels of all heads.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fem.ops.scaled_sums import Memory, Streams, Sums, enter, enter_backward, leave, leave_backward, nothing
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

    def beta_of_states(self) -> Tensor | None:
        return None if self.beta is None else self.beta.repeat(self.a.shape[0])


def ssm_scan(
    delta: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor | None,
    v: Tensor,
    beta: Tensor | None,
    opens: Tensor | None,
    start: Memory,
) -> tuple[Memory, Memory]:
    """What every token reads, (B, T, D), and the memory after the last, (B, N D), from that before the first."""
    size = len(start.parts())
    outputs = _ssm_scan(delta, a, b, c, skip, v, beta, opens, start.parts())
    return Memory(*outputs[:size]), Memory(*outputs[size : 2 * size])


_INPUTS = "Tensor delta, Tensor a, Tensor b, Tensor c, Tensor? skip, Tensor v, Tensor? beta, Tensor? opens"


@torch.library.custom_op("fem::ssm_scan", mutates_args=(), schema=f"({_INPUTS}, Tensor[] start) -> Tensor[]")
def _ssm_scan(delta, a, b, c, skip, v, beta, opens, start):
    """Reads, memory after the last token, then for the backward pass: the energies of both, the states at borders."""
    inputs = Inputs(delta, a, b, c, skip, v, beta, opens)
    beta_of_states = inputs.beta_of_states()
    states = [stream for stream in enter(Memory(*start), beta_of_states) if stream is not None]
    borders, seen = [], []
    for piece in inputs.pieces():
        segment, streams = inputs.cut(piece)
        borders.append(states)
        after = [advance(segment, *stream, before) for stream, before in zip(streams, states)]
        seen.append([observe(segment, *s, before, now) for s, before, now in zip(streams, states, after)])
        states = [Sums(peak[:, -1].clone(), sums[:, :, -1].clone()) for peak, sums in after]
    seen = [Sums(torch.cat([y.peak for y in ys], 1), torch.cat([y.sums for y in ys], 2)) for ys in zip(*seen)]
    ends = [leave(Streams(*seen), beta), leave(Streams(*states), beta_of_states)]
    energies = [] if beta is None else [seen[1].sums[0], states[1].sums[0]]
    kept = [torch.stack(parts) for stream in zip(*borders) for parts in zip(*stream)]
    return [*ends[0].parts(), *ends[1].parts(), *energies, *kept]


@_ssm_scan.register_fake
def _(delta, a, b, c, skip, v, beta, opens, start):
    size = len(start)
    states = start[0]
    count = -(-v.shape[1] // SEGMENT)
    reads = [v.new_empty(v.shape) for _ in range(size)]
    after = [states.new_empty(states.shape) for _ in range(size)]
    kept = [states.new_empty(count, *states.shape), states.new_empty(count, 2, *states.shape)]
    if beta is None:
        return [*reads, *after, *kept]
    energies = [v.new_empty(v.shape), states.new_empty(states.shape)]
    return [*reads, *after, *energies, *kept, kept[0].clone(), states.new_empty(count, 1, *states.shape)]


@torch.library.custom_op(
    "fem::ssm_scan_backward",
    mutates_args=(),
    schema=f"(Tensor[] grads, {_INPUTS}, Tensor[] start, Tensor[] outputs) -> Tensor[]",
)
def _ssm_scan_backward(grads, delta, a, b, c, skip, v, beta, opens, start, outputs):
    """Gradients of delta, a, b, c, v, the start without its peak, and, where there are any, skip and beta."""
    inputs, size = Inputs(delta, a, b, c, skip, v, beta, opens), len(start)
    begin, reads, after = Memory(*start), Memory(*outputs[:size]), Memory(*outputs[size : 2 * size])
    energies, kept = (
        ((None, None), outputs[2 * size :]) if beta is None else (outputs[2 * size :][:2], outputs[2 * size + 2 :])
    )
    borders = [Sums(*stream) for stream in zip(kept[::2], kept[1::2])]

    d_reads, d_after = Memory(None, *grads[: size - 1]), Memory(None, *grads[size - 1 :])
    *d_seen, d_beta = leave_backward(d_reads, reads, energies[0], beta)
    *d_end, d_beta_end = leave_backward(d_after, after, energies[1], inputs.beta_of_states())
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

    d_begin, d_beta_begin = enter_backward(*d_end, begin, inputs.beta_of_states())
    if beta is not None:
        d_beta += (d_beta_begin + d_beta_end).sum(0).view_as(a).sum(0)
    return [d_delta, d_a, d_b, d_c, d_v, *d_begin.parts(), *(x for x in (d_skip, d_beta) if x is not None)]


@_ssm_scan_backward.register_fake
def _(grads, delta, a, b, c, skip, v, beta, opens, start, outputs):
    return [torch.empty_like(x) for x in (delta, a, b, c, v, *start[1:], skip, beta) if x is not None]


def _save(ctx, inputs, output):
    *tensors, start = inputs
    ctx.save_for_backward(*tensors, *start, *output)
    ctx.size = len(start)


def _differentiate(ctx, grads):
    saved = ctx.saved_tensors
    tensors, rest = saved[:8], saved[8:]
    start, outputs, size = rest[: ctx.size], rest[ctx.size :], ctx.size
    given = [*grads[1:size], *grads[size + 1 : 2 * size]]
    d_delta, d_a, d_b, d_c, d_v, *rest = _ssm_scan_backward(given, *tensors, start, outputs)
    d_start, rest = rest[: size - 1], iter(rest[size - 1 :])
    d_skip, d_beta = (None if x is None else next(rest) for x in (tensors[4], tensors[6]))
    return d_delta, d_a, d_b, d_c, d_skip, d_v, d_beta, None, [None, *d_start]


_ssm_scan.register_autograd(_differentiate, setup_context=_save)
