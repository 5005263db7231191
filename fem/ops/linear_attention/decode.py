"""Linear attention token by token: for generation and for `torch.export`."""

from __future__ import annotations

import torch

from fem.ops.common.read import LOG_ZERO, NO_WEIGHT, Terms, log, log_average, merge
from fem.ops.common.steps import along_time
from fem.ops.linear_attention.chunk import State


def step(q, k, v, free, beta, g, state: State, present: bool = True) -> tuple[Terms, State]:
    """The read of one token and the state after it; q, k, v, free, g are (B, 1, H, d), the state (B, H, ...).

    Without `present` the token reads only those before it.

    w'_c = e^{g_c} w_c + k_c        mean'_c, F'_c: the reads of channel c and of the token, merged
    Z = sum_c q_c w'_c      mean = sum_c q_c w'_c mean'_c / Z      F = (1/beta) log(sum_c q_c w'_c e^{beta F'_c} / Z)
    """
    value = v.transpose(1, 2).expand_as(state.mean)
    energy = value if free is None else free.transpose(1, 2).expand_as(state.free_energy)
    left = state.log_weight if g is None else state.log_weight + g[:, 0]
    per_channel = None if beta is None else beta.unsqueeze(1)
    before = Terms(left.unsqueeze(-1), state.mean, state.free_energy)
    after = merge(before, Terms(log(k[:, 0]).unsqueeze(-1), value, energy), per_channel)
    after = after._replace(log_weight=after.log_weight.clamp_min(LOG_ZERO))
    log_weight, mean, free_energy = after if present else before
    scores = log(q[:, 0]).unsqueeze(-1) + log_weight
    total = scores.logsumexp(2, keepdim=True)
    seen = total > NO_WEIGHT
    log_p = torch.where(seen, scores - total, LOG_ZERO)  # rows that see nothing have no p that sums to 1
    reads = [torch.where(seen, log_p.exp().mT @ mean, 0)]
    if beta is not None:
        reads.append(torch.where(seen, log_average(log_p, per_channel * free_energy, 2) / per_channel, 0))
    total = torch.where(seen, total, LOG_ZERO)
    return Terms(*(x.transpose(1, 2) for x in (total, *reads))), State(after.log_weight.squeeze(-1), *after[1:])


def by_steps(q, k, v, free, beta, g, start: State, present: bool) -> tuple[Terms, State]:
    """The scan of (B, T, H, d), one `step` after another: for `torch.export` and second derivatives."""

    def token(before, *parts):
        q, k, v, free, g = (None if x is None else x.unsqueeze(1) for x in parts)
        terms, after = step(q, k, v, free, beta, g, State(*before), present)
        return [x for x in after if x is not None], [x[:, 0] for x in terms if x is not None]

    last, rows = along_time(token, [x for x in start if x is not None], q, k, v, free, g)
    return Terms(*rows), State(*last)
