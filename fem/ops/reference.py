"""The definitions in float64: loops and explicit formulas, slow, differentiable by plain autograd.

The tests compare everything else with these; they share no code with what they test.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from fem.ops.read import Read

# --- softmax ---------------------------------------------------------------------------------------------------------


def softmax_read(
    q: Float[Tensor, "b tq h dk"],
    k: Float[Tensor, "b t hkv dk"],
    v: Float[Tensor, "b t hkv dv"],
    beta: Float[Tensor, "hkv dv"] | None,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    bias: Float[Tensor, "..."] | None = None,
    key_mask: Shaped[Tensor, "b t"] | None = None,
    segment_ids: Int[Tensor, "b t"] | None = None,
) -> Read:
    """Mean and free energy under a softmax prior, entry by entry of the definition, in float64.

    p_ti = softmax_i(scale q_t . k_i + bias_ti) over the allowed i
    mean_tj = sum_i p_ti v_ij        F_tj = (1 / beta_j) log sum_i p_ti exp(beta_j v_ij)        (Eq. 4)
    """
    q, k, v = q.double(), k.double(), v.double()
    batch, queries, heads, width = q.shape
    time, groups = k.shape[1], heads // k.shape[2]
    scale = width**-0.5 if scale is None else scale
    if bias is not None:
        bias = bias.double().expand(batch, heads, queries, time)
    means, free_energies = [], []
    for b in range(batch):
        allowed = _allowed(
            queries,
            time,
            causal,
            window,
            [True] * time if key_mask is None else [bool(m) for m in key_mask[b].tolist()],
            [0] * time if segment_ids is None else segment_ids[b].tolist(),
            segment_ids is not None,
        ).to(q.device)
        for h in range(heads):
            g = h // groups
            s = scale * (q[b, :, None, h, :] * k[b, None, :, g, :]).sum(-1)
            if bias is not None:
                s = s + bias[b, h]
            seen = allowed & ~torch.isneginf(s.detach())
            empty = ~seen.any(1, keepdim=True)
            s = torch.where(seen, s, -torch.inf).masked_fill(empty, 0.0)
            p = torch.softmax(s, 1)
            log_p = torch.log_softmax(s, 1)
            means.append((p @ v[b, :, g]).masked_fill(empty, 0.0))
            if beta is not None:
                bj = beta[g].double()
                exponent = log_p[:, :, None] + (bj * v[b, :, g])[None]
                free_energies.append((torch.logsumexp(exponent, 1) / bj).masked_fill(empty, 0.0))
    stacked = lambda parts: torch.stack(parts).unflatten(0, (batch, heads)).transpose(1, 2)  # noqa: E731
    return Read(stacked(means), None if beta is None else stacked(free_energies))


def _allowed(queries, time, causal, window, keep, ids, packed) -> Tensor:
    document, position = [], []
    last, number, place = None, 0, -1
    for i in range(time):
        if keep[i]:
            if packed and last is not None and ids[i] != last:
                number, place = number + 1, -1
            last, place = ids[i], place + 1
        document.append(number)
        position.append(max(place, 0))
    allowed = torch.zeros(queries, time, dtype=torch.bool)
    for row in range(queries):
        t = row + time - queries
        for i in range(time):
            if not keep[i] or (causal and i > t):
                continue
            if packed and document[i] != document[t]:
                continue
            if window is not None and abs(position[t] - position[i]) >= window:
                continue
            allowed[row, i] = True
    return allowed


# --- keyed scan ------------------------------------------------------------------------------------------------------


def keyed_scan_read(
    q: Float[Tensor, "b t h dk"],
    k: Float[Tensor, "b t h dk"],
    v: Float[Tensor, "b t h dv"],
    beta: Float[Tensor, "h dv"] | None,
    log_decay: Float[Tensor, "b t h *dk"] | None = None,
    causal: bool = True,
    key_mask: Shaped[Tensor, "b t"] | None = None,
    segment_ids: Int[Tensor, "b t"] | None = None,
    initial_state: dict[str, Tensor] | None = None,
    normalize: bool = True,
) -> tuple[Read, dict[str, Tensor]]:
    """Mean and free energy under a linear-attention prior with decay, row by row of the definition, in float64.

        s_t(i) = sum_c q_tc exp(sum_{i<r<=t} log_decay_rc) k_ic over the allowed i; for i > t the sum has t <= r < i
        mean_tj = sum_i s_t(i) v_ij / Z_t        F_tj = (1/beta_j) log(sum_i s_t(i) exp(beta_j v_ij) / Z_t)
        Z_t = sum_i s_t(i), or 1 with normalize=False

    The state after the last token is the read of each key channel c, with weights exp(sum_{i<r} log_decay_rc) k_ic.
    An initial state stands for one token per key channel before the first.
    """
    q, k, v = q.double(), k.double(), v.double()
    batch, time, heads, width = q.shape
    beta = None if beta is None else beta.double()
    g = torch.zeros_like(q) if log_decay is None else log_decay.double()
    g = (g if g.ndim == 4 else g.unsqueeze(-1)).expand_as(q)
    keep = torch.ones(batch, time) if key_mask is None else key_mask
    rows, states = [], []
    for b in range(batch):
        kept = [t for t in range(time) if keep[b, t]]
        ids = [0] * time if segment_ids is None else segment_ids[b].tolist()
        log_k, means, energies = k[b, kept].log(), v[b, kept], v[b, kept]  # the items that can be seen, in order
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
                s = (q[b, t].log() + left).logsumexp(-1)
                rows.append(_weighted_read(s, means[seen], energies[seen], beta, normalize))
            else:
                none = v.new_zeros(heads, v.shape[-1])
                rows.append((none, none))
        if numbers and causal:
            seen, left = weights(len(numbers) - 1)
            reads = [_weighted_read(left[..., c], means[seen], energies[seen], beta, True) for c in range(width)]
            mean, free_energy = (torch.stack(parts, 1) for parts in zip(*reads))
            states.append((left.logsumexp(0), mean, free_energy))
    mean, free_energy = (torch.stack(parts).unflatten(0, (batch, time)) for parts in zip(*rows))
    names = ("log_weight", "mean", "free_energy")[: 2 if beta is None else 3]
    state = dict(zip(names, (torch.stack(parts) for parts in zip(*states)))) if states else {}
    return Read(mean, None if beta is None else free_energy), state


def _weighted_read(s: Tensor, means: Tensor, energies: Tensor, beta: Tensor | None, normalize: bool):
    """s (i, h) are logarithms of the weights of the items, means and energies (i, h, dv)."""
    total = s.logsumexp(0)
    empty = torch.isneginf(total.detach()).unsqueeze(-1)
    log_p = (s - total if normalize else s).masked_fill(empty.squeeze(-1), 0.0).unsqueeze(-1)
    mean = (log_p.exp() * means).sum(0).masked_fill(empty, 0.0)
    if beta is None:
        return mean, mean
    return mean, ((log_p + beta * energies).logsumexp(0) / beta).masked_fill(empty, 0.0)


# --- recurrences -----------------------------------------------------------------------------------------------------


def decay_scan(
    log_decay: Float[Tensor, "b t c"], u: Float[Tensor, "b t c"], initial_state: Float[Tensor, "b c"] | None = None
) -> Float[Tensor, "b t c"]:
    """h_t = exp(log_decay_t) h_{t-1} + u_t, one step after the other, in float64."""
    h = torch.zeros_like(u[:, 0]).double() if initial_state is None else initial_state.double()
    rows = []
    for t in range(u.shape[1]):
        h = log_decay[:, t].double().exp() * h + u[:, t].double()
        rows.append(h)
    return torch.stack(rows, 1)


def channel_scan_read(
    log_weight: Float[Tensor, "b t h dv"] | None,
    v: Float[Tensor, "b t h dv"],
    beta: Float[Tensor, "h dv"] | None,
    log_decay: Float[Tensor, "b t h dv"] | None = None,
    causal: bool = True,
    key_mask: Shaped[Tensor, "b t"] | None = None,
    segment_ids: Int[Tensor, "b t"] | None = None,
    normalize: bool = True,
) -> Read:
    """Mean and free energy under a weight per value channel that decays, in float64.

    s_tj(i) = exp(log_weight_ij + sum_{i<r<=t} log_decay_rj); for i > t the sum runs over t <= r < i
    """
    x = torch.zeros_like(v) if log_weight is None else log_weight
    a = torch.zeros_like(v) if log_decay is None else log_decay
    x, a, v = x.double(), a.double(), v.double()
    read = lambda b, t, seen: torch.stack([x[b, i] + d for i, d in _decayed(a[b], t, seen)])  # noqa: E731
    return _read_rows(read, v, beta, causal, key_mask, segment_ids, normalize)


def ssm_read(
    delta: Float[Tensor, "b t h dv"],
    A: Float[Tensor, "h dv n"],
    B: Float[Tensor, "b t n"],
    C: Float[Tensor, "b t n"],
    D: Float[Tensor, "h dv"],
    v: Float[Tensor, "b t h dv"],
    beta: Float[Tensor, "h dv"] | None,
    causal: bool = True,
    key_mask: Shaped[Tensor, "b t"] | None = None,
    segment_ids: Int[Tensor, "b t"] | None = None,
    normalize: bool = True,
) -> Read:
    """Mean and free energy under the impulse response of a selective state space model, in float64.

    s_tj(i) = sum_n C_tn exp(sum_{i<r<=t} delta_rj A_jn) delta_ij B_in + D_j [i = t]; for i > t over t <= r < i
    """
    delta, A, B, C, D, v = (tensor.double() for tensor in (delta, A, B, C, D, v))
    a = delta.unsqueeze(-1) * A

    def log_scores(b: int, t: int, seen: list[int]) -> Tensor:
        scores = []
        for i, decay in _decayed(a[b], t, seen):
            terms = [decay + (C[b, t] * B[b, i]).log() + delta[b, i].log().unsqueeze(-1)]
            if i == t:
                terms.append(D.log().unsqueeze(-1))
            scores.append(torch.cat(terms, -1).logsumexp(-1))
        return torch.stack(scores)

    return _read_rows(log_scores, v, beta, causal, key_mask, segment_ids, normalize)


def _decayed(log_decay: Tensor, t: int, seen: list[int]):
    """The tokens of `seen` with the decay between each and t."""
    zero = torch.zeros_like(log_decay[t])
    for i in seen:
        between = [r for r in seen if (i < r <= t) or (t <= r < i)]
        yield i, sum((log_decay[r] for r in between), zero)


def _read_rows(log_scores, v, beta, causal, key_mask, segment_ids, normalize) -> Read:
    """The read of every row t from log_scores(b, t, seen), (len(seen), H, d_v), over the tokens of its document."""
    batch, time = v.shape[:2]
    beta = None if beta is None else beta.double()
    nothing = torch.zeros_like(v[0, 0])
    rows = []
    for b in range(batch):
        document, last = [], None
        for t in range(time):
            if key_mask is not None and not key_mask[b, t]:
                rows.append((nothing, nothing))
                continue
            same = segment_ids is None or last is None or segment_ids[b, t] == segment_ids[b, last]
            document, last = ([*document, t] if same else [t]), t
            seen = document if causal else _whole_document(b, t, time, key_mask, segment_ids)
            mean, free_energy = _weighted_read_per_channel(log_scores(b, t, seen), v[b, seen], beta, normalize)
            rows.append((mean, free_energy))
    mean, free_energy = (torch.stack(parts).unflatten(0, (batch, time)) for parts in zip(*rows))
    return Read(mean, None if beta is None else free_energy)


def _whole_document(b, t, time, key_mask, segment_ids) -> list[int]:
    kept = [i for i in range(time) if key_mask is None or key_mask[b, i]]
    here = kept.index(t)
    first = last = here
    same = lambda i, j: segment_ids is None or segment_ids[b, kept[i]] == segment_ids[b, kept[j]]  # noqa: E731
    while first > 0 and same(first, first - 1):
        first -= 1
    while last + 1 < len(kept) and same(last, last + 1):
        last += 1
    return kept[first : last + 1]


def _weighted_read_per_channel(s: Tensor, v: Tensor, beta: Tensor | None, normalize: bool) -> tuple[Tensor, Tensor]:
    """s (i, h, dv) are logarithms of the weights of the values v (i, h, dv)."""
    empty = torch.isneginf(s.detach()).all(0)
    s = s.masked_fill(empty, 0.0)
    log_p = s - s.logsumexp(0) if normalize else s
    mean = (log_p.exp() * v).sum(0).masked_fill(empty, 0.0)
    if beta is None:
        return mean, mean
    return mean, ((log_p + beta * v).logsumexp(0) / beta).masked_fill(empty, 0.0)
