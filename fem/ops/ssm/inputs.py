"""What `ssm_read` reads, cut into segments of tokens, and what the tokens of each segment see.

A segment is computed by `numbers`, where no sum over- or underflows, or by `logarithms`. D stands for the value
channels of all heads.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fem.ops.common.scaled_sums import Streams, Sums
from fem.ops.ssm import numbers
from fem.ops.ssm.logarithms import Segment, advance, observe
from fem.ops.ssm.numbers import Steps

SEGMENT = 64
SCHEMA = (
    "Tensor delta, Tensor a, Tensor b, Tensor c, Tensor? skip, Tensor v, Tensor? beta, Tensor? opens, "
    "Tensor? log_delta, Tensor? log_b, Tensor? log_c"
)


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

    def cut(self, piece: slice) -> tuple[Segment, list[tuple[Tensor, Tensor | None]]]:
        """A segment, and the (z, payload) of its streams."""
        v = self.v[:, piece]
        log_delta, log_b, log_c = self.logs(piece)
        log_input = log_delta.unsqueeze(-2) + log_b.unsqueeze(-1)
        log_skip = None if self.skip is None else self.skip.log()
        segment = Segment(self.log_decay(piece), log_input, log_c, log_skip)
        streams = [(torch.zeros_like(v), v)]
        return segment, streams if self.beta is None else [*streams, (self.beta * v, None)]

    def steps(self, piece: slice, largest: Tensor | None) -> Steps:
        """A segment in plain numbers; energies are relative to the largest beta v of each channel, (B, D)."""
        v = self.v[:, piece]
        payload = [torch.ones_like(v), v]
        if self.beta is not None:
            payload.append((self.beta * v - largest.unsqueeze(1)).exp_())
        added = self.delta[:, piece].unsqueeze(-2) * self.b[:, piece].unsqueeze(-1)
        return Steps(self.log_decay(piece), added, self.c[:, piece], self.skip, torch.stack(payload))

    def log_decay(self, piece: slice) -> Tensor:
        """Into each token of a segment, (B, T, N, D)."""
        log_decay = self.delta[:, piece].unsqueeze(-2) * self.a
        if self.opens is not None:
            log_decay.masked_fill_(self.opens[:, piece, None, None], -math.inf)
        return log_decay

    def pieces(self) -> list[slice]:
        return [slice(first, first + SEGMENT) for first in range(0, self.v.shape[1], SEGMENT)]


Found = tuple[Streams, list[list[Tensor]], Streams]  # what tokens see, states at borders, those after the last token


def by_logarithms(inputs: Inputs, states: Streams) -> Found:
    borders, seen = [], []
    for piece in inputs.pieces():
        segment, streams = inputs.cut(piece)
        borders.append(states.parts())
        after = [advance(segment, *stream, before) for stream, before in zip(streams, states)]
        seen.append([observe(segment, *s, before, now) for s, before, now in zip(streams, states, after)])
        states = Streams(*after).last()
    seen = [Sums(torch.cat([y.peak for y in ys], 1), torch.cat([y.sums for y in ys], 2)) for ys in zip(*seen)]
    return Streams(*seen), borders, states


def in_plain_numbers(inputs: Inputs, start: Streams) -> Found | None:
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
        seen.append(numbers.observe(steps, after))
        states = after[:, :, -1].clone()
    seen = torch.cat(seen, 2)
    return (streams(seen), borders, streams(states)) if numbers.held(seen) else None


def streams_before(start: list[Tensor], a: Tensor, beta: Tensor | None) -> tuple[Streams, Tensor | None]:
    """The streams before the first token, and the temperature of every state, (N D)."""
    per_state = None if beta is None else beta.repeat(len(a))
    return Streams.after(*start, beta=per_state), per_state
