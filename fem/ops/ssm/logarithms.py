"""One of the two streams of `ssm_read` over a segment of tokens, forwards and backwards.

    state_n = sum_{i <= t} e^{sum a_n} delta_i B_in e^{z_i} (1, v_i)        y = sum_n C_n state_n + D e^{z_t} (1, v_t)

The stream of the weights has z = 0 and the payload v, that of the energies z = beta v and no payload. States are scaled
sums; y has a peak of its own. delta, B, C and D enter as logarithms, and so do their gradients.
Shapes: D for the value channels of all heads; z, v (B, T, D); C (B, T, N); A (N, D); states (B, T, N, D).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fem.ops.common.read import LOG_ZERO
from fem.ops.common.scaled_sums import Sums, accumulate, accumulate_backward, last_step


class Segment(NamedTuple):
    """What both streams share: decays, and what enters and leaves the states."""

    log_decay: Tensor  # (B, T, N, D)
    log_input: Tensor  # log(delta B), (B, T, N, D)
    log_c: Tensor
    log_skip: Tensor | None  # log D; None: a token does not read itself, only what stood before it


def advance(segment: Segment, z: Tensor, v: Tensor | None, start: Sums) -> Sums:
    """The states after every token, (B, T, N D)."""
    x = segment.log_input + z.unsqueeze(-2)
    return accumulate(segment.log_decay.flatten(-2), x.flatten(-2), _per_state(v, x), start)


def observe(segment: Segment, z: Tensor, v: Tensor | None, start: Sums, states: Sums) -> Sums:
    """y for every token, (B, T, D)."""
    sums, top, share, direct = _look(segment, z, start, states)
    y = (sums * share).sum(-2)
    if direct is not None:
        y[0].add_(direct)
        if v is not None:
            y[1].addcmul_(direct, v)
    y[0].clamp_(min=0.25)  # at least about 1/2 unless nothing is seen
    return Sums(top, y)


def backward(
    grad: Tensor, grad_end: Tensor, segment: Segment, z: Tensor, v: Tensor | None, start: Sums
) -> tuple[Segment, Tensor | None, Tensor | None, Tensor]:
    """Gradients of segment, z (None for the weights, whose z is 0), v and start, from those of y, (K, B, T, D), and of
    the last states, (K, B, N D)."""
    states = advance(segment, z, v, start)
    sums, _, share, direct = _look(segment, z, start, states)
    pull = (sums * grad.unsqueeze(-2)).sum(0) * share
    d_states = (grad.unsqueeze(-2) * share).flatten(-2)
    d_z, d_v, d_skip, on_itself, d_before = None, None, None, 0, 0
    if direct is None:
        d_before, d_states = d_states[:, :, 0], torch.cat([d_states[:, :, 1:], torch.zeros_like(d_states[:, :, :1])], 2)
    else:
        on_token = grad[0] if v is None else torch.addcmul(grad[0], grad[1], v)
        on_itself = direct * on_token
        d_skip = on_itself.sum((0, 1))
    d_states[:, :, -1] += grad_end

    x = segment.log_input + z.unsqueeze(-2)
    entered = accumulate_backward(
        d_states, segment.log_decay.flatten(-2), x.flatten(-2), _per_state(v, x), start, states
    )
    shape = x.shape
    d_decay = entered.log_decay.view(shape)
    if direct is None:
        d_decay.add_(pull)
    d_input = (entered.added * entered.weight).view(shape)
    if v is None:
        d_z = d_input.sum(-2).add_(on_itself)
    else:
        d_v = entered.v.view(shape).sum(-2)
        if direct is not None:
            d_v.addcmul_(direct, grad[1])
    return Segment(d_decay, d_input, pull.sum(-1), d_skip), d_z, d_v, entered.start + d_before


def _look(segment: Segment, z: Tensor, start: Sums, states: Sums) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The states' sums; the peak of all that a token reads; its states' factors and that of log_skip relative to it."""
    shape = segment.log_decay.shape
    peak, sums = states
    if segment.log_skip is None:
        peak, sums = last_step(peak, start.peak) + segment.log_decay.flatten(-2), last_step(sums, start.sums)
    peak = peak.view(shape)
    heights = peak + segment.log_c.unsqueeze(-1)
    top, direct = heights.amax(-2), None
    if segment.log_skip is not None:
        direct = segment.log_skip + z
        top = torch.maximum(top, direct)
    top.clamp_(min=LOG_ZERO)
    direct = None if direct is None else direct.sub_(top).exp_()
    return sums.view(-1, *shape), top, heights.sub_(top.unsqueeze(-2)).exp_(), direct


def _per_state(v: Tensor | None, like: Tensor) -> Tensor | None:
    return None if v is None else v.unsqueeze(-2).expand_as(like).flatten(-2)
