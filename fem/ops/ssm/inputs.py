"""What `ssm_read` reads, cut into segments of tokens. D stands for the value channels of all heads."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fem.ops.ssm.logarithms import Segment
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
