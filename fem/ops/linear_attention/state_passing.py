"""The state from chunk to chunk: each chunk decays it and adds its own tokens.

    w' = e^g w + x            keep = e^g w / w'
    mean' = keep mean + (1 - keep) mean_x        F' = (1/beta) log(keep e^{beta F} + (1 - keep) e^{beta F_x})

Weights are kept as logarithms and values as averages, so that nothing over- or underflows, and what a chunk adds to a
state of a hundred thousand tokens is not rounded away. r counts rows and heads, n chunks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fem.ops.common.read import LOG_ZERO
from fem.ops.linear_attention.chunk import State


def pass_states(start: State, added: State, through: Tensor | None, beta: Tensor | None) -> State:
    """The state at all chunk boundaries, (r, n + 1, ...), from the first, (r, ...), and what chunks add, (r, n, ...).

    through: (r, n, dk or 1), the whole chunk's decay as a logarithm; beta: (r, 1, dv).
    """
    weights = [start.log_weight]
    for n in range(added.log_weight.shape[1]):
        left = weights[-1] if through is None else weights[-1] + through[:, n]
        weights.append(torch.logaddexp(left, added.log_weight[:, n]).clamp_min(LOG_ZERO))
    log_weight = torch.stack(weights, 1)
    fresh = _fresh(log_weight, added, through)

    share = torch.sigmoid(fresh).unsqueeze(-1)
    means = [start.mean]
    for n in range(share.shape[1]):
        means.append(torch.lerp(means[-1], added.mean[:, n], share[:, n]))
    if beta is None:
        return State(log_weight, torch.stack(means, 1), None)

    energies = [start.free_energy]
    heavier = fresh.unsqueeze(-1) > 0
    staying, entering = F.logsigmoid(-fresh).unsqueeze(-1), F.logsigmoid(fresh).unsqueeze(-1)
    for n in range(share.shape[1]):
        before, new = energies[-1], added.free_energy[:, n]
        base = torch.where(heavier[:, n], new, before)
        gain = torch.logaddexp(staying[:, n] + beta * (before - base), entering[:, n] + beta * (new - base))
        energies.append(base + gain / beta)
    return State(log_weight, torch.stack(means, 1), torch.stack(energies, 1))


def pass_states_backward(
    grad: State, last: State, state: State, added: State, through: Tensor | None, beta: Tensor | None
) -> tuple[State, State, Tensor, Tensor | None]:
    """Gradients of start, added, through and beta.

    grad (r, n, ...) arrives at the state that each chunk reads, last (r, ...) at the final one.
    """
    fresh = _fresh(state.log_weight, added, through)
    share = torch.sigmoid(fresh).unsqueeze(-1)
    keep = torch.sigmoid(-fresh).unsqueeze(-1)
    d_mean, d_mean_after = _descend(grad.mean, last.mean, keep)
    d_fresh = ((d_mean_after * (added.mean - state.mean[:, :-1])).sum(-1, keepdim=True) * keep * share).squeeze(-1)
    d_added_mean = share * d_mean_after
    d_energy = d_added_energy = d_beta = None
    if beta is not None:
        before, after, added_energy = state.free_energy[:, :-1], state.free_energy[:, 1:], added.free_energy
        temperature = beta.unsqueeze(1)
        gain = fresh.unsqueeze(-1) + temperature * (added_energy - before)
        stays, enters = torch.sigmoid(-gain), torch.sigmoid(gain)
        d_energy, d_energy_after = _descend(grad.free_energy, last.free_energy, stays)
        per_nat = d_energy_after / temperature
        lighter = torch.where(fresh.unsqueeze(-1) > 0, keep - stays, enters - share)  # equal, but for their rounding
        d_fresh = d_fresh + (per_nat * lighter).sum(-1)
        d_added_energy = enters * d_energy_after
        d_beta = (per_nat * (stays * (before - after) + enters * (added_energy - after))).sum((1, 2)).unsqueeze(1)
    keep, share = keep.squeeze(-1), share.squeeze(-1)

    d_weight = [last.log_weight]
    through_n = []
    for n in reversed(range(keep.shape[1])):
        through_n.append(keep[:, n] * d_weight[-1] - d_fresh[:, n])
        d_weight.append(through_n[-1] + grad.log_weight[:, n])
    d_through = torch.stack(through_n[::-1], 1)
    d_after = torch.stack(d_weight[-2::-1], 1)
    d_start = State(d_weight[-1], d_mean[:, 0], None if beta is None else d_energy[:, 0])
    d_added = State(share * d_after + d_fresh, d_added_mean, d_added_energy)
    return d_start, d_added, d_through, d_beta


def _fresh(log_weight: Tensor, added: State, through: Tensor | None) -> Tensor:
    """log of what each chunk adds, over what is left of the state before."""
    left = log_weight[:, :-1] if through is None else log_weight[:, :-1] + through
    return added.log_weight - left


def _descend(grad: Tensor, last: Tensor, stays: Tensor) -> tuple[Tensor, Tensor]:
    """G_n = grad_n + stays_n G_{n+1} from G_N = last: G_0 .. G_{N-1}, and G_1 .. G_N."""
    total = [last]
    for n in reversed(range(grad.shape[1])):
        total.append(torch.addcmul(grad[:, n], stays[:, n], total[-1]))
    total = torch.stack(total[::-1], 1)
    return total[:, :-1], total[:, 1:]
