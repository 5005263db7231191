"""`ssm_read` over a segment in plain numbers, where these do not over- or underflow: a third of the logarithms' work.

    h_k,t = e^{delta_t A} h_k,t-1 + delta_t B_t w_k,t        y_k = sum_n C_n h_k + D w_k        w = 1, v, e^{beta v - m}

m is the largest beta v of the sequence. Where all totals are well inside the dtype's range (`held`), terms that have
underflowed were negligible. Shapes as in `logarithms`; K = 2 sums without a beta, 3 with it; states (K, B, T, N D).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fem.ops.common.recurrence import adjoint_sums, running_sums
from fem.ops.common.scaled_sums import last_step


class Steps(NamedTuple):
    """What the tokens of a segment do to the states."""

    log_decay: Tensor  # (B, T, N, D)
    added: Tensor  # delta B, (B, T, N, D)
    c: Tensor
    skip: Tensor
    payload: Tensor  # w, (K, B, T, D)

    def states(self, start: Tensor) -> Tensor:
        terms = self.added * self.payload.unsqueeze(-2)
        return running_sums(self.log_decay.flatten(-2), terms.flatten(-2), start)

    def by_state(self, states: Tensor) -> Tensor:
        return states.view(*states.shape[:-1], *self.log_decay.shape[-2:])


def observe(steps: Steps, states: Tensor) -> Tensor:
    """y, (K, B, T, D)."""
    seen = (steps.c.unsqueeze(-1) * steps.by_state(states)).sum(-2)
    return seen.addcmul_(steps.skip, steps.payload)


def held(y: Tensor) -> bool:
    """Whether every total, of weights and of energies, is far from the limits of the dtype's range."""
    totals = y[::2]
    least = torch.finfo(y.dtype).tiny ** 0.5
    return bool((totals.amin() > least) & (totals.amax() < 1 / least) & y.isfinite().all())


def backward(grad: Tensor, grad_end: Tensor, steps: Steps, start: Tensor) -> tuple[Steps, Tensor]:
    """Gradients of steps and start from those of y, (K, B, T, D), and of the last states, (K, B, N D)."""
    log_decay = steps.log_decay.flatten(-2)
    states = steps.states(start)
    pull = (steps.c.unsqueeze(-1) * grad.unsqueeze(-2)).flatten(-2)
    pull[:, :, -1] += grad_end
    reach = adjoint_sums(log_decay, pull)
    d_start = log_decay[:, 0].exp() * reach[:, :, 0]
    d_c = (steps.by_state(states) * grad.unsqueeze(-2)).sum((0, -1))
    before, reach = steps.by_state(last_step(states, start)), steps.by_state(reach)
    d_decay, d_added = (torch.zeros_like(steps.added) for _ in range(2))
    for later, earlier, w in zip(reach, before, steps.payload):
        d_decay.addcmul_(later, earlier)
        d_added.addcmul_(later, w.unsqueeze(-2))
    d_skip, d_payload = (grad * steps.payload).sum((0, 1, 2)), (reach * steps.added).sum(-2)
    d_payload.addcmul_(steps.skip, grad)
    return Steps(d_decay.mul_(steps.log_decay.exp()), d_added, d_c, d_skip, d_payload), d_start
