"""What the tokens of `ssm_read` see, segment by segment: by `numbers`, where no sum over- or underflows, or by
`logarithms`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fem.ops.common.scaled_sums import Streams, Sums
from fem.ops.ssm import numbers
from fem.ops.ssm.inputs import Inputs
from fem.ops.ssm.logarithms import advance, observe

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
