"""The linear attention read in float64, by loops over its definition: slow, differentiable by plain autograd.

The tests compare every implementation with it; it shares no code with what it tests.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from fem.ops.common.naive_rows import weighted_read
from fem.ops.common.read import Read


def naive_linear_attention_read(
    q: Float[Tensor, "b t h dk"],
    k: Float[Tensor, "b t h dk"],
    v: Float[Tensor, "b t h dv"],
    beta: Float[Tensor, "h df"] | None,
    log_decay: Float[Tensor, "b t h *dk"] | None = None,
    causal: bool = True,
    key_mask: Shaped[Tensor, "b t"] | None = None,
    segment_ids: Int[Tensor, "b t"] | None = None,
    initial_state: dict[str, Tensor] | None = None,
    normalize: bool = True,
    free_values: Float[Tensor, "b t h df"] | None = None,
) -> tuple[Read, dict[str, Tensor]]:
    """Mean and free energy under a linear-attention prior with decay, row by row of the definition, in float64.

        s_t(i) = sum_c q_tc exp(sum_{i<r<=t} log_decay_rc) k_ic over the allowed i; for i > t the sum has t <= r < i
        mean_tj = sum_i s_t(i) v_ij / Z_t        F_tj = (1/beta_j) log(sum_i s_t(i) exp(beta_j f_ij) / Z_t)
        Z_t = sum_i s_t(i), or 1 with normalize=False; f are the free values, v without them

    The state after the last token is the read of each key channel c, with weights exp(sum_{i<r} log_decay_rc) k_ic.
    An initial state stands for one token per key channel before the first.
    """
    q, k, v = q.double(), k.double(), v.double()
    batch, time, heads, width = q.shape
    beta = None if beta is None else beta.double()
    g = torch.zeros_like(q) if log_decay is None else log_decay.double()
    g = (g if g.ndim == 4 else g.unsqueeze(-1)).expand_as(q)
    f = v if free_values is None else free_values
    keep = torch.ones(batch, time) if key_mask is None else key_mask
    rows, states = [], []
    for b in range(batch):
        kept = [t for t in range(time) if keep[b, t]]
        ids = [0] * time if segment_ids is None else segment_ids[b].tolist()
        log_k, means, energies = k[b, kept].log(), v[b, kept], f[b, kept]  # the items that can be seen, in order
        before = 0
        if initial_state is not None:
            before = width
            own = torch.eye(width, dtype=torch.float64).log().unsqueeze(1)
            log_k = torch.cat([own + initial_state["log_weight"][b].double(), log_k])
            means = torch.cat([initial_state["mean"][b].double().transpose(0, 1), means])
            free_energy = initial_state["mean" if beta is None else "free_energy"]
            energies = torch.cat([free_energy[b].double().transpose(0, 1), energies])
        document, numbers = 0, []
        for n, t in enumerate(kept):
            document += n > 0 and ids[t] != ids[kept[n - 1]]
            numbers.append(document)
        numbers = [0] * before + numbers
        place = {t: before + n for n, t in enumerate(kept)}
        decay = torch.cat([torch.zeros(before, heads, width, dtype=torch.float64), g[b, kept]])

        def weights(n, log_k=log_k, decay=decay, numbers=numbers):
            """The items that item n may see, and the logarithms of their decayed keys."""
            first = numbers.index(numbers[n])
            last = n if causal else first + numbers.count(numbers[n]) - 1
            back = decay[first + 1 : n + 1].flip(0).cumsum(0).flip(0)
            left = torch.cat([back, torch.zeros_like(decay[:1]), decay[n:last].cumsum(0)])
            return slice(first, last + 1), left + log_k[first : last + 1]

        for t in range(time):
            if t in place:
                seen, left = weights(place[t])
                s = (q[b, t].log() + left).logsumexp(-1, keepdim=True)
                rows.append(weighted_read(s, means[seen], energies[seen], beta, normalize))
            else:
                rows.append((torch.zeros_like(v[b, t]), torch.zeros_like(f[b, t])))
        if numbers and causal:
            seen, left = weights(len(numbers) - 1)
            channels = left.split(1, -1)
            reads = [weighted_read(one, means[seen], energies[seen], beta, True) for one in channels]
            mean, free_energy = (torch.stack(parts, 1) for parts in zip(*reads))
            states.append((left.logsumexp(0), mean, free_energy))
        elif causal:  # nothing kept, and nothing before
            nothing = [x.new_zeros(heads, width, x.shape[-1], dtype=torch.float64) for x in (v, f)]
            states.append((torch.full_like(q[b, 0], -1e30), *nothing))
    mean, free_energy = (torch.stack(parts).unflatten(0, (batch, time)) for parts in zip(*rows))
    names = ("log_weight", "mean", "free_energy")[: 2 if beta is None else 3]
    state = dict(zip(names, (torch.stack(parts) for parts in zip(*states)))) if states else {}
    return Read(mean, None if beta is None else free_energy), state
