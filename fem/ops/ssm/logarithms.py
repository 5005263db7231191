"""One of the two streams of `ssm_read` over a segment of tokens, forwards and backwards.

    state_n = sum_{i <= t} e^{sum a_n} delta_i B_in e^{z_i} (1, v_i)        y = sum_n C_n state_n + D e^{z_t} (1, v_t)

The weights have z = 0 and the payload v, the energies z = beta v and none. States are scaled sums; y is relative to
a peak of its own. Where delta, B, C or D is 0 the gradient is still exact: no factor is differentiated as a logarithm.
Shapes: D for the value channels of all heads; delta, v, z (B, T, D); B, C (B, T, N); A (N, D); states (B, T, N, D).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fem.ops.common.scaled_sums import Sums, accumulate, accumulate_backward, last_step, nothing

LARGEST = 80.0  # a greater exponent belongs to a factor 0, whose derivative no float holds


class Segment(NamedTuple):
    """What both streams share: decays, and what enters and leaves the states."""

    log_decay: Tensor  # (B, T, N, D)
    log_input: Tensor  # log(delta B)
    c: Tensor
    skip: Tensor | None  # D; None: a token does not read itself, only what stood before it


class StreamGradients(NamedTuple):
    log_decay: Tensor
    input: Tensor  # of delta B, (B, T, N, D)
    c: Tensor
    skip: Tensor | None
    z: Tensor | None  # None for the weights, whose z is 0
    v: Tensor | None
    start: Tensor


def advance(segment: Segment, z: Tensor, v: Tensor | None, start: Sums) -> Sums:
    """The states after every token, (B, T, N D)."""
    x = segment.log_input + z.unsqueeze(-2)
    return accumulate(segment.log_decay.flatten(-2), x.flatten(-2), _per_state(v, x), start)


def observe(segment: Segment, z: Tensor, v: Tensor | None, start: Sums, states: Sums) -> Sums:
    """y for every token, (B, T, D)."""
    top, scale, own, sums = _look(segment, z, start, states)
    y = (sums * (scale * segment.c.unsqueeze(-1))).sum(-2)
    if segment.skip is not None:
        own.mul_(segment.skip)
        y[0].add_(own)
        if v is not None:
            y[1].addcmul_(own, v)
    y[0].clamp_(min=0.25)  # at least about 1/2 unless nothing is seen
    return Sums(top, y)


def backward(
    grad: Tensor, grad_end: Tensor, segment: Segment, z: Tensor, v: Tensor | None, start: Sums
) -> StreamGradients:
    """Gradients from those of y, (K, B, T, D), and of the last states, (K, B, N D)."""
    states = advance(segment, z, v, start)
    _, scale, own, sums = _look(segment, z, start, states)
    c = segment.c.unsqueeze(-1)
    pull = (sums * grad.unsqueeze(-2)).sum(0).mul_(scale)
    d_c = pull.sum(-1)
    d_states = (grad.unsqueeze(-2) * (scale * c)).flatten(-2)
    d_z, d_v, d_skip, on_itself = None, None, None, 0
    if segment.skip is None:
        d_before, d_states = d_states[:, :, 0], last_step_backward(d_states)
    else:
        d_before = 0
        on_itself = own * (grad[0] if v is None else torch.addcmul(grad[0], grad[1], v))
        d_skip = on_itself.sum((0, 1))
        on_itself.mul_(segment.skip)
    d_states[:, :, -1] += grad_end

    x = segment.log_input + z.unsqueeze(-2)
    entered = accumulate_backward(
        d_states, segment.log_decay.flatten(-2), x.flatten(-2), _per_state(v, x), start, states
    )
    shape = x.shape
    d_decay = entered.log_decay.view(shape)
    if segment.skip is None:
        d_decay.addcmul_(pull, c)
    added = entered.added.view(shape)
    if v is None:
        d_z = (added * entered.weight.view(shape)).sum(-2).add_(on_itself)
    else:
        d_v = entered.v.view(shape).sum(-2)
        if segment.skip is not None:
            d_v.addcmul_(own.mul_(segment.skip), grad[1])
    d_input = (z.unsqueeze(-2) - states.peak.view(shape)).clamp_(max=LARGEST).exp_().mul_(added)
    return StreamGradients(d_decay, d_input, d_c, d_skip, d_z, d_v, entered.start + d_before)


def last_step_backward(grad: Tensor) -> Tensor:
    return torch.cat([grad[..., 1:, :], torch.zeros_like(grad[..., :1, :])], -2)


def _look(segment: Segment, z: Tensor, start: Sums, states: Sums) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The peak of all that a token reads; its states' and its own factor relative to it; the states' sums."""
    shape = segment.log_decay.shape
    peak, sums = states
    if segment.skip is None:
        peak, sums = last_step(peak, start.peak) + segment.log_decay.flatten(-2), last_step(sums, start.sums)
    peak = peak.view(shape)
    top = (peak + segment.c.log().unsqueeze(-1)).amax(-2)
    if segment.skip is not None:
        top = torch.maximum(top, segment.skip.log() + z)
    top.clamp_(min=nothing(top.dtype))
    scale = (peak - top.unsqueeze(-2)).clamp_(max=LARGEST).exp_()
    return top, scale, (z - top).clamp_(max=LARGEST).exp_(), sums.view(-1, *shape)


def _per_state(v: Tensor | None, like: Tensor) -> Tensor | None:
    return None if v is None else v.unsqueeze(-2).expand_as(like).flatten(-2)
