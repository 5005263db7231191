"""Single entries of the free energy, from the definition in float64: what one attention call could not prove."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

_ENTRIES_TIMES_KEYS = 1 << 21  # at once

Entries = Int[Tensor, "n 4"]  # (batch, head, row, channel) of each, in ascending order
AddScores = Callable[[int, int, Tensor, Tensor], None]  # of batch, head, rows, and the gradients of their first keys


@runtime_checkable
class RowsOfScores(Protocol):
    """Where scores come from: q and k per head, and rows of scale q k + mask in float64."""

    q: Float[Tensor, "b tq h d"]
    k: Float[Tensor, "b t h d"]
    scale: float

    def of_rows(self, batch: int, head: int, rows: Tensor) -> Float[Tensor, "r keys"]: ...


class _Block(NamedTuple):
    """Some entries of one head: n of them, in r rows of scores."""

    part: slice
    batch: int
    head: int
    rows: Int[Tensor, " r"]
    row_of: Int[Tensor, " n"]
    channel: Int[Tensor, " n"]
    s: Float[Tensor, "r keys"]
    v: Float[Tensor, "keys dv"]
    beta: Float[Tensor, " n"]

    def log_weights(self) -> Float[Tensor, "n keys"]:
        """s_ti + beta_j v_ij: the posterior's logits."""
        return self.s[self.row_of] + self.beta[:, None] * self.v.T[self.channel]

    def free_energy(self, log_weights: Tensor) -> Float[Tensor, " n"]:
        total = self.s.logsumexp(1)[self.row_of]
        return torch.where(total > -torch.inf, (log_weights.logsumexp(1) - total) / self.beta, 0.0)


def free_energies(scores: RowsOfScores, v: Tensor, beta: Tensor, entries: Entries) -> Float[Tensor, " n"]:
    """F_tj = (1 / beta_j) (log sum_i exp(s_ti + beta_j v_ij) - log sum_i exp(s_ti)) of the entries.         (Eq. 4)"""
    free = beta.new_empty(len(entries), dtype=torch.float64)
    for block in _blocks(scores, v, beta, entries):
        free[block.part] = block.free_energy(block.log_weights())
    return free


def add_gradients(
    scores: RowsOfScores,
    v: Tensor,
    beta: Tensor,
    entries: Entries,
    grad: Float[Tensor, " n"],
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dbeta: Tensor,
    add_scores: AddScores | None,
) -> None:
    """Add the gradients of the entries' free energies to those given, with W the posterior of an entry:

    dF/dv_ij = W_i        dF/dbeta_j = sum_i W_i (v_ij - F) / beta_j        dF/ds_i = (W_i - p_i) / beta_j
    """
    for block in _blocks(scores, v, beta, entries):
        b, h, rows, keys = block.batch, block.head, block.rows, len(block.v)
        log_weights = block.log_weights()
        free = block.free_energy(log_weights)
        empty = torch.isneginf(block.s).all(1)
        g = grad[block.part].double().masked_fill_(empty[block.row_of], 0.0)
        posterior = torch.softmax(log_weights, 1).masked_fill_(empty[block.row_of, None], 0.0)
        spread = (posterior * (block.v.T[block.channel] - free[:, None])).sum(1) / block.beta
        dv[b, :keys, h] += torch.zeros_like(block.v).index_add_(1, block.channel, (posterior * g[:, None]).T)
        dbeta[b % len(dbeta), 0, h].index_add_(0, block.channel, (g * spread).to(dbeta.dtype))
        g = g / block.beta
        total = g.new_zeros(len(rows)).index_add_(0, block.row_of, g)
        of_scores = torch.softmax(block.s, 1).masked_fill_(empty[:, None], 0.0).mul_(-total[:, None])
        of_scores.index_add_(0, block.row_of, posterior.mul_(g[:, None]))
        dq[b, rows, h] += (scores.scale * of_scores @ scores.k[b, :keys, h].double()).to(dq.dtype)
        dk[b, :keys, h] += scores.scale * of_scores.T @ scores.q[b, rows, h].double()
        if add_scores is not None:
            add_scores(b, h, rows, of_scores)


def _blocks(scores: RowsOfScores, v: Tensor, beta: Tensor, entries: Entries) -> Iterator[_Block]:
    step = max(1, _ENTRIES_TIMES_KEYS // v.shape[1])
    heads, counts = entries[:, :2].unique_consecutive(dim=0, return_counts=True)
    first = 0
    for (batch, head), count in zip(heads.tolist(), counts.tolist()):
        last = first + count
        for start in range(first, last, step):
            part = slice(start, min(start + step, last))
            rows, row_of = entries[part, 2].unique_consecutive(return_inverse=True)
            channel = entries[part, 3]
            s = scores.of_rows(batch, head, rows)
            values = v[batch, : s.shape[1], head].double()
            beta_of = beta[batch % len(beta), 0, head, channel].double()
            yield _Block(part, batch, head, rows, row_of, channel, s, values, beta_of)
        first = last
